"""Do the driver, CUDA and NCCL of a machine fit torch?"""

from collections.abc import Iterator

from finetune.commands.doctor.checks.findings import Finding, has_severe, must_fix, note, should_fix
from finetune.commands.doctor.facts.host import Gpu, GpuFacts, HostFacts
from finetune.commands.doctor.facts.launch import Facts

_WHEELS = ((13, 0), (12, 8), (12, 6))
"""Versions of CUDA for which download.pytorch.org has builds of torch, the newest first."""

OLDEST_DRIVERS = {11: "450.80", 12: "525.60", 13: "580.65"}
"""The oldest driver for each major version of CUDA (CUDA's release notes, "minor version compatibility")."""


def check_drivers(host: HostFacts, facts: Facts) -> Iterator[Finding]:
    """Yield what keeps torch from using the GPUs of a machine."""
    gpus, software = host.gpus, host.software
    if gpus.problem is not None:
        yield must_fix(
            "driver",
            f"the NVIDIA driver does not answer: {gpus.problem}",
            why="no process can use a GPU until it does",
            fix="reboot after an update of the driver, or `sudo modprobe nvidia`; then `nvidia-smi` must list the GPUs",
        )
    if not gpus.gpus and not (gpus.has_driver and gpus.problem is None):
        return
    if software.torch_cuda is None:
        yield must_fix(
            "torch-build",
            f"there is an NVIDIA driver, but torch {software.packages.get('torch', '')} is a build for CPUs",
            why="every rank would train on the CPU",
            fix=f"pip install torch --index-url https://download.pytorch.org/whl/{_wheel(gpus)}",
        )
        return
    misfits = list(_driver_version(gpus, software.torch_cuda, software.compatibility_library))
    yield from misfits
    for gpu in gpus.gpus:
        yield from _architecture(gpu, software.torch_architectures)
    is_explained = has_severe(misfits) or host.variables.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if gpus.gpus and software.num_torch_devices == 0 and not is_explained:
        yield must_fix(
            "torch-sees-no-gpu",
            f"NVML lists {len(gpus.gpus)} GPUs, and torch sees none",
            why="every rank would train on the CPU",
            fix="python -c 'import torch; torch.cuda.init()' prints the reason; start a container with --gpus all",
        )
    if len(gpus.gpus) > 1 and software.num_torch_devices and software.nccl is None:
        yield must_fix(
            "nccl",
            "this build of torch has no NCCL",
            why="the GPUs of several ranks cannot communicate",
            fix=f"pip install torch --index-url https://download.pytorch.org/whl/{_wheel(gpus)}",
        )


def _driver_version(gpus: GpuFacts, torch_cuda: str, compatibility: str | None) -> Iterator[Finding]:
    wanted, offered = _numbers(torch_cuda), _numbers(gpus.driver_cuda or "")
    if not offered:
        return
    text = f"torch is built for CUDA {torch_cuda}, the driver {gpus.driver} runs CUDA up to {gpus.driver_cuda}"
    if compatibility is not None and any("GeForce" in gpu.name for gpu in gpus.gpus):
        yield must_fix(
            "forward-compatibility",
            f"{text}; {compatibility} is loaded",
            why="forward compatibility exists on data centre GPUs alone: CUDA fails with error 804 on GeForce",
            fix="take the folder of that file out of LD_LIBRARY_PATH",
        )
    elif wanted[0] > offered[0] and compatibility is None:
        newest = OLDEST_DRIVERS.get(wanted[0], "a newer one")
        yield must_fix(
            "driver-too-old",
            text,
            why="a driver runs no newer major version of CUDA: torch.cuda.is_available() is False",
            fix=f"pip install torch --index-url https://download.pytorch.org/whl/{_wheel(gpus)}; or install driver "
            f"{newest} or newer; or, on data centre GPUs, `apt-get install cuda-compat-{wanted[0]}-{wanted[1]}`",
        )
    elif wanted > offered and compatibility is None:
        yield note(
            "driver-minor-version",
            text,
            why="it runs (minor version compatibility), but kernels that come as PTX fail with `unsupported toolchain`",
            fix="install a newer driver where a kernel fails so",
        )
    elif compatibility is not None and offered >= wanted:
        yield should_fix(
            "forward-compatibility",
            f"{text}; {compatibility} is loaded all the same",
            why="the older libcuda of the container takes the place of the driver's own",
            fix="take the folder of that file out of LD_LIBRARY_PATH",
        )


def _architecture(gpu: Gpu, architectures: tuple[str, ...]) -> Iterator[Finding]:
    if gpu.capability is None or not architectures or runs_on(gpu.capability, architectures):
        return
    yield must_fix(
        "architecture",
        f"GPU {gpu.index} ({gpu.name}) is sm_{gpu.capability[0]}{gpu.capability[1]}, and torch is compiled for "
        f"{', '.join(architectures)}",
        why="kernels fail with `no kernel image is available for execution on the device`",
        fix="install a build of torch for another CUDA: cu128 or cu130 for new GPUs, cu126 for old ones "
        "(https://pytorch.org/get-started)",
    )


def runs_on(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Return whether kernels for one of the architectures, or PTX for an older one, run on such a GPU.

    >>> runs_on((8, 9), ("sm_80", "sm_90")), runs_on((12, 0), ("sm_90",)), runs_on((12, 0), ("compute_90",))
    (True, False, True)
    """
    for architecture in architectures:
        form, _, digits = architecture.rstrip("af").partition("_")
        if not digits.isdigit():
            continue
        major, minor = int(digits[:-1]), int(digits[-1])
        if form == "sm" and major == capability[0] and minor <= capability[1]:
            return True
        if form == "compute" and (major, minor) <= capability:
            return True
    return False


def _wheel(gpus: GpuFacts) -> str:
    """Return the newest build of torch that the driver runs."""
    offered = _numbers(gpus.driver_cuda or "13.0")
    found = next((each for each in _WHEELS if each <= offered), None)
    major, minor = found or ((12, 6) if offered[0] == 12 else _WHEELS[0])
    return f"cu{major}{minor}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
