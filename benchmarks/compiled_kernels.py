"""Compile every Triton kernel that a run can launch for GPUs of four generations, on a machine without one.

`python benchmarks/compiled_kernels.py` prints registers per thread, bytes that spill to local memory, and bytes of
shared memory, by the assembler that comes with triton. Each kernel is launched as a step of a model with the shapes of
Llama-3-8B does it; the launch is recorded instead of run. Exit code 1 if a kernel does not compile.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from liger_kernel import ops
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from finetune.train.optim import low_bit_kernel

CAPABILITIES = (80, 90, 100, 120)
"""Of an A100, an H100, a B200 and an RTX 5090."""

_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_BIN = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Launch:
    """A kernel, and what it was launched with."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        """Return the name of the function."""
        return str(self.kernel.fn.__name__).strip("_")


@dataclass(frozen=True)
class Usage:
    """What a thread or block of the compiled kernel uses."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


def recorded_launches() -> list[Launch]:
    """Return the launches of forward and backward passes of the fused layers, and of the low-bit optimizer."""
    launches: list[Launch] = []
    with _recording(launches):
        for casting, offset in (("llama", 0.0), ("gemma", 1.0)):
            rows, weight = _tensor(128, 4096), _tensor(4096)
            _backward(ops.LigerRMSNormFunction.apply(rows, weight, 1e-6, offset, casting, False))
        _backward(ops.LigerSiLUMulFunction.apply(_tensor(128, 14336), _tensor(128, 14336)))
        _backward(ops.LigerGELUMulFunction.apply(_tensor(128, 14336), _tensor(128, 14336)))
        angles = _tensor(1, 128, 128).detach()
        query, _ = ops.LigerRopeFunction.apply(_tensor(1, 32, 128, 128), _tensor(1, 8, 128, 128), angles, angles)
        _backward(query)
        for dtype in (torch.float32, torch.bfloat16):
            for moments in (torch.bfloat16, torch.uint8):
                _update(dtype, moments)
    return launches


def _tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)


def _backward(output: torch.Tensor) -> None:
    output.backward(torch.ones_like(output))


def _update(dtype: torch.dtype, moments: torch.dtype) -> None:
    weights = torch.zeros(4096, dtype=dtype)
    state = {name: torch.zeros(4096, dtype=moments) for name in ("exp_avg", "exp_avg_sq")}
    if moments == torch.uint8:
        state |= {f"{name}_scale": torch.zeros(16) for name in ("exp_avg", "exp_avg_sq")}
    low_bit_kernel.launch_update(
        weights,
        weights,
        state={**state, "step": torch.zeros(())},
        start=0,
        skip=torch.zeros(()),
        update=low_bit_kernel.KernelUpdate(1e-4, (0.9, 0.999), 1e-8, 0.1, 1, 2, dtype == torch.bfloat16),
    )


@contextmanager
def _recording(launches: list[Launch]) -> Iterator[None]:
    def record(kernel: Any, *values: Any, grid: object, warmup: bool, **named: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        arguments = {**dict(zip(names, values, strict=False)), **named}
        options = {name: arguments.pop(name) for name in _OPTIONS if name in arguments}
        launches.append(Launch(kernel, {name: arguments[name] for name in names}, options))

    with patch.object(JITFunction, "run", record), _gpu():
        yield


@contextmanager
def _gpu() -> Iterator[None]:
    """Let the host code of kernels ask for the properties of a GPU."""
    properties = type("Properties", (), {"multi_processor_count": 132})()
    with patch("torch.cuda.get_device_properties", lambda *_: properties):
        yield


def compiled(launch: Launch, capability: int) -> Usage:
    """Return what the kernel uses on GPUs of this compute capability; raises what the compilers raise."""
    constants = {p.name: launch.arguments[p.name] for p in launch.kernel.params if p.is_constexpr}
    signature = {
        name: "constexpr" if name in constants or value is None else mangle_type(value)
        for name, value in launch.arguments.items()
    }
    constants |= {name: None for name, value in launch.arguments.items() if value is None}
    source = ASTSource(launch.kernel, signature, constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        target = re.search(r"^\.target (\S+)", kernel.asm["ptx"], re.MULTILINE)
        assert target is not None, "PTX names its target"
        assembler = _BIN / ("ptxas-blackwell" if capability >= 90 else "ptxas")  # the other one knows older PTX alone
        command = [str(assembler), "-v", f"--gpu-name={target[1].rstrip(',')}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None and spills is not None, said
    return Usage(int(registers[1]), int(spills[1]), kernel.metadata.shared)


def main() -> int:
    print("| kernel | " + " | ".join(f"sm_{capability}" for capability in CAPABILITIES) + " |")
    print("|---|" + "---|" * len(CAPABILITIES))
    code = 0
    for launch in recorded_launches():
        cells = []
        for capability in CAPABILITIES:
            try:
                used = compiled(launch, capability)
                cells.append(f"{used.registers} / {used.spilled_bytes} / {used.shared_bytes}")
            except Exception as error:
                cells.append(f"{type(error).__name__}: {str(error).splitlines()[0][:60]}")
                code = 1
        print(f"| {launch.name} | {' | '.join(cells)} |", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
