"""The GPUs of this machine and their driver, asked through NVML (`nvidia-ml-py`), without a CUDA context."""

import os
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil

from finetune.commands.doctor.facts.host import Gpu, GpuFacts, GpuProcess
from finetune.runtime.optional import lazily

with lazily():
    import pynvml

DRIVER_MARKS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Where a driver shows itself; the last one is WSL's."""

_THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_P2P = {0: "ok", 1: "chipset not supported", 2: "GPU not supported", 3: "topology not supported", 4: "disabled"}


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
            driver=_text(_query(pynvml.nvmlSystemGetDriverVersion)),
            driver_cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            gpus=tuple(_gpu(index, handle) for index, handle in enumerate(handles)),
            p2p=dict(_p2p(handles)),
        )
    finally:
        pynvml.nvmlShutdown()


def _query(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer; None where this GPU or driver has none."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _gpu(index: int, handle: Any) -> Gpu:
    memory = _query(pynvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _query(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Gpu(
        index=index,
        name=_text(_query(pynvml.nvmlDeviceGetName, handle)) or "unknown",
        memory_bytes=0 if memory is None else int(memory.total),
        memory_used_bytes=0 if memory is None else int(memory.used),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        pci_bus=_text(getattr(_query(pynvml.nvmlDeviceGetPciInfo, handle), "busId", None)) or "",
        mig=_is_on(_query(pynvml.nvmlDeviceGetMigMode, handle)) is True,
        persistence=_is_on(_query(pynvml.nvmlDeviceGetPersistenceMode, handle)),
        compute_mode=_COMPUTE_MODES.get(_query(pynvml.nvmlDeviceGetComputeMode, handle) or 0, "default"),
        processes=tuple(_processes(handle)),
        **_errors(handle),
        **_power_and_clocks(handle),
        **_pcie(handle),
    )


def _is_on(mode: Any) -> bool | None:
    current = mode[0] if isinstance(mode, list | tuple) else mode
    return None if current is None else bool(current)


def _errors(handle: Any) -> dict[str, Any]:
    counted = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    remapped = _query(pynvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
    return {
        "ecc": _is_on(_query(pynvml.nvmlDeviceGetEccMode, handle)),
        "uncorrected_errors": _query(pynvml.nvmlDeviceGetTotalEccErrors, handle, *counted),
        "remap_pending": bool(remapped[2]),
        "remap_failed": bool(remapped[3]),
    }


def _power_and_clocks(handle: Any) -> dict[str, Any]:
    reasons = _query(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    slowdown = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    return {
        "power_watts": _watts(_query(pynvml.nvmlDeviceGetPowerUsage, handle)),
        "power_limit_watts": _watts(_query(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        "power_default_watts": _watts(_query(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
        "clock_mhz": _query(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        "max_clock_mhz": _query(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        "throttle_reasons": tuple(text for bit, text in _THROTTLE_REASONS.items() if reasons & bit),
        "temperature_celsius": _query(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        "slowdown_celsius": _query(pynvml.nvmlDeviceGetTemperatureThreshold, handle, slowdown),
    }


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _pcie(handle: Any) -> dict[str, Any]:
    return {
        "pcie_generation": _query(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        "max_pcie_generation": _query(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        "pcie_width": _query(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        "max_pcie_width": _query(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
    }


def _processes(handle: Any) -> Iterator[GpuProcess]:
    """Yield the processes of others; those outside this container have no name."""
    for process in _query(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
        if process.pid == os.getpid():
            continue
        try:
            name = psutil.Process(process.pid).name()
        except psutil.Error:
            name = "unknown"
        yield GpuProcess(int(process.pid), name, process.usedGpuMemory)


def _p2p(handles: list[Any]) -> Iterator[tuple[str, str]]:
    for (first, one), (second, other) in combinations(enumerate(handles), 2):
        status = _query(pynvml.nvmlDeviceGetP2PStatus, one, other, pynvml.NVML_P2P_CAPS_INDEX_READ)
        if status is not None:
            yield f"{first}-{second}", _P2P.get(int(status), "unknown")
