"""The GPUs of a machine and their links: facts by NVML (without a CUDA context) and `nvidia-smi topo -m`."""

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from finetune.runtime.optional import lazily

with lazily():
    import pynvml


@dataclass(frozen=True)
class Gpu:
    """One GPU, as NVML describes it."""

    index: int
    name: str
    memory_bytes: int
    memory_used_bytes: int = 0
    uncorrected_errors: int = 0  # since the driver was loaded
    is_remap_pending: bool = False  # of damaged rows of memory, until a reset
    has_failed_remap: bool = False
    processes: Mapping[int, str] = field(default_factory=dict)  # names by process id

    @property
    def has_bad_memory(self) -> bool:
        """Return whether errors were found that cannot be corrected."""
        return self.uncorrected_errors > 0 or self.is_remap_pending or self.has_failed_remap


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs of a machine, their driver and how they are connected."""

    has_driver: bool = False
    driver: str | None = None
    driver_cuda: str | None = None  # the newest CUDA that the driver runs
    gpus: tuple[Gpu, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)  # of pairs of GPUs: {"0-1": "NV18"}
    problem: str | None = None  # the reason why NVML does not answer


DRIVER_MARKS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))  # dxg: under WSL


def gather_gpus() -> GpuFacts:
    """Return the GPUs; a machine without a driver has none, and one whose driver does not answer has a `problem`."""
    has_driver = any(mark.exists() for mark in DRIVER_MARKS)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuFacts(has_driver=has_driver, problem=str(error) if has_driver else None)
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        cuda = _query(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        return GpuFacts(
            has_driver=True,
            driver=_query(pynvml.nvmlSystemGetDriverVersion),
            driver_cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            gpus=tuple(_gather_gpu(index, handle) for index, handle in enumerate(handles)),
        )
    finally:
        pynvml.nvmlShutdown()


def _query(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer; None if this GPU or driver does not support the query."""
    try:
        answer = function(*arguments)
    except pynvml.NVMLError:
        return None
    return answer.decode() if isinstance(answer, bytes) else answer


def _gather_gpu(index: int, handle: Any) -> Gpu:
    memory = _query(pynvml.nvmlDeviceGetMemoryInfo, handle)
    ecc_counter = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    _, _, is_remap_pending, has_failed_remap = _query(pynvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
    processes = _query(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    return Gpu(
        index=index,
        name=_query(pynvml.nvmlDeviceGetName, handle) or "unknown",
        memory_bytes=0 if memory is None else int(memory.total),
        memory_used_bytes=0 if memory is None else int(memory.used),
        uncorrected_errors=_query(pynvml.nvmlDeviceGetTotalEccErrors, handle, *ecc_counter) or 0,
        is_remap_pending=bool(is_remap_pending),
        has_failed_remap=bool(has_failed_remap),
        processes={process.pid: _process_name(process.pid) for process in processes if process.pid != os.getpid()},
    )


def _process_name(process_id: int) -> str:
    try:
        return str(psutil.Process(process_id).name())
    except psutil.Error:
        return "outside this container"


_TOOL_SECONDS = 10.0


def read_links() -> dict[str, str]:
    """Return the link of each pair of GPUs; raises OSError if `nvidia-smi` does not print them."""
    command = ["nvidia-smi", "topo", "-m"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True)
    except subprocess.SubprocessError as error:
        raise OSError(f"`{' '.join(command)}` failed: {error}") from error
    return parse_links(done.stdout)


def parse_links(text: str) -> dict[str, str]:
    """Return the links of `nvidia-smi topo -m`, whose first columns and rows are the GPUs."""
    links: dict[str, str] = {}
    columns: list[str] = []
    for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines():
        words = line.split()
        if not columns:
            columns = re.findall(r"GPU(\d+)", line)
        elif words and words[0].startswith("GPU"):
            index = words[0].removeprefix("GPU")
            pairs = zip(columns, words[1:], strict=False)
            links |= {f"{index}-{other}": link for other, link in pairs if int(index) < int(other)}
    return links
