"""Utilization, power and other values of this rank's GPU, read once a second through NVML in the background.

Utilisation, power and temperature are NVML's last reading; what goes over NVLink is counted between two readings. NVML
measures PCIe traffic for 20 ms in each direction when it is asked. What a GPU does not report, such as the power of a
MIG instance, is left out.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from finetune.runtime.optional import lazily

with lazily():
    import pynvml

INTERVAL_SECONDS = 1.0

UTILIZATION, POWER, TEMPERATURE = "gpu_utilization", "gpu_power_watts", "gpu_temperature_celsius"
MEMORY, PCIE, NVLINK = "gpu_memory_used_bytes", "pcie_bytes_per_second", "nvlink_bytes_per_second"
COLUMNS = (UTILIZATION, POWER, TEMPERATURE, MEMORY, PCIE, NVLINK)
"""The possible names in `StepTaken.device`."""

_ALL_LINKS = 0xFFFFFFFF
_KIB, _KB = 1024, 1000


class DeviceColumns:
    """The latest values of a device by name; none without a GPU that NVML can read."""

    columns: Mapping[str, float] = {}

    def warning(self) -> str | None:
        """Return once why there are no more values."""
        return None


class GpuSampler(DeviceColumns):
    """Samples one GPU in a thread; if the GPU is lost, there is a warning, and its columns end."""

    def __init__(self, nvml: Any, uuid: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`uuid` is as torch writes it. Raises NVML's error if the driver or the GPU cannot be queried."""
        self._nvml = nvml
        self._clock = clock
        nvml.nvmlInit()
        try:  # by UUID, as NVML ignores CUDA_VISIBLE_DEVICES
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        except (nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument):
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}".encode())
        self._sent: tuple[float, int] | None = None  # over NVLink: the time of the last reading and its bytes
        self._problem: str | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
        self.columns: Mapping[str, float] = {}

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling."""
        self._is_over.set()
        self._thread.join(timeout=2 * INTERVAL_SECONDS)
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def warning(self) -> str | None:
        """Return once why the columns have ended."""
        problem, self._problem = self._problem, None
        return problem

    def sample(self) -> bool:
        """Read every column once; return whether there may be more to read later."""
        nvml, handle = self._nvml, self._handle
        counters = (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
        columns: Mapping[str, Callable[[], float | None]] = {
            UTILIZATION: lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            POWER: lambda: float(nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            TEMPERATURE: lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            MEMORY: lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            PCIE: lambda: float(_KB * sum(nvml.nvmlDeviceGetPcieThroughput(handle, each) for each in counters)),
            NVLINK: self._nvlink_rate,
        }
        readings: dict[str, float] = {}
        for name, read in columns.items():
            try:
                value = read()
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
                continue
            except nvml.NVMLError as error:
                self.columns = {}
                self._problem = f"the GPU can no longer be read: {type(error).__name__}: {error}"
                return False
            if value is not None:
                readings[name] = value
        self.columns = readings
        return True

    def _run(self) -> None:
        while self.sample() and not self._is_over.wait(INTERVAL_SECONDS):
            pass

    def _nvlink_rate(self) -> float | None:
        """Return the traffic of all links in both directions per second since the last reading; None at the first."""
        nvml = self._nvml
        fields = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        values = nvml.nvmlDeviceGetFieldValues(self._handle, [(field, _ALL_LINKS) for field in fields])
        if any(value.nvmlReturn != nvml.NVML_SUCCESS for value in values):
            return None
        now, sent = self._clock(), _KIB * sum(int(value.value.ullVal) for value in values)
        before, self._sent = self._sent, (now, sent)
        if before is None or now <= before[0] or sent < before[1]:
            return None
        return (sent - before[1]) / (now - before[0])


@contextmanager
def sampled_gpu(device: torch.device, *, is_main: bool) -> Iterator[DeviceColumns]:
    """Sample this rank's GPU meanwhile, on the main rank, whose events are written.

    Without a GPU, without NVML and where its driver is not loaded there are no columns, and no warning.
    """
    sampler = None
    if is_main and device.type == "cuda":
        with suppress(ModuleNotFoundError):  # pynvml
            errors = (pynvml.NVMLError, AttributeError)  # an AMD GPU, or a torch that does not know the UUID
            with suppress(*errors):
                sampler = GpuSampler(pynvml, str(torch.cuda.get_device_properties(device).uuid))
    if sampler is None:
        yield DeviceColumns()
        return
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()
