"""A GPU is asked through NVML in the background; what goes wrong there never stops a run."""

import ctypes
import inspect
from types import SimpleNamespace

import pynvml
import pytest
import torch

from finetune.report import gpu
from finetune.report.gpu import COLUMNS, DeviceColumns, GpuSampler, sampled_gpu
from tests.devices import ON_GPU

UUID = "8f3a2c1e-0000-1111-2222-333344445555"


class FakeNvml:
    """NVML with one GPU; errors and constants are those of pynvml, and so are the functions' parameters."""

    def __init__(self, *, uuid=f"GPU-{UUID}", fails=None, missing=()):
        self.uuid, self.fails, self.missing = uuid, fails or {}, missing
        self.kib = 0
        self.is_open = False

    def __getattr__(self, name):
        real = getattr(pynvml, name)
        if inspect.isfunction(real):
            return lambda *given: self._call(name, real, given)
        return real

    def _call(self, name, real, given):
        inspect.signature(real).bind(*given)
        if name in self.missing:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if name in self.fails:
            raise pynvml.NVMLError(self.fails[name])
        return getattr(self, f"_{name}")(*given)

    def _nvmlInit(self):
        self.is_open = True

    def _nvmlShutdown(self):
        self.is_open = False

    def _nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid.decode() != self.uuid:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "handle"

    def _nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=87, memory=40)

    def _nvmlDeviceGetPowerUsage(self, handle):
        return 412_500

    def _nvmlDeviceGetTemperature(self, handle, sensor):
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return 61

    def _nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=70 << 30)

    def _nvmlDeviceGetPcieThroughput(self, handle, counter):
        return {pynvml.NVML_PCIE_UTIL_TX_BYTES: 3000, pynvml.NVML_PCIE_UTIL_RX_BYTES: 1000}[counter]

    def _nvmlDeviceGetFieldValues(self, handle, fields):
        self.kib += 500
        return [_field(self.kib) for _ in fields]


def _field(kib):
    value = pynvml.c_nvmlFieldValue_t()
    value.nvmlReturn = pynvml.NVML_SUCCESS
    value.value.ullVal = ctypes.c_ulonglong(kib).value
    return value


def seconds():
    """A clock that goes on by two seconds a look."""
    now = 0.0
    while True:
        now += 2.0
        yield now


def sampler(nvml):
    ticks = seconds()
    return GpuSampler(nvml, UUID, clock=lambda: next(ticks))


def test_every_column_is_in_its_unit():
    sampled = sampler(FakeNvml())
    assert sampled.sample()
    assert "nvlink_bytes_per_second" not in sampled.columns  # traffic is counted between two readings
    assert sampled.sample()
    assert sampled.columns == {
        "gpu_utilization": 0.87,
        "gpu_power_watts": 412.5,
        "gpu_temperature_celsius": 61.0,
        "gpu_memory_used_bytes": float(70 << 30),
        "pcie_bytes_per_second": 4_000_000.0,
        "nvlink_bytes_per_second": 2 * 500 * 1024 / 2.0,
    }
    assert set(sampled.columns) == set(COLUMNS)


def test_a_mig_instance_is_found_with_the_columns_it_reports():
    missing = ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetFieldValues")
    sampled = sampler(FakeNvml(uuid=f"MIG-{UUID}", missing=missing))
    assert sampled.sample()
    assert set(sampled.columns) == {"gpu_temperature_celsius", "gpu_memory_used_bytes", "pcie_bytes_per_second"}


def test_a_gpu_that_is_lost_is_one_warning_and_its_columns_end():
    nvml = FakeNvml()
    sampled = sampler(nvml)
    assert sampled.sample()
    nvml.fails = {"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_GPU_IS_LOST}
    assert not sampled.sample()
    assert sampled.columns == {}
    assert "GPU is lost" in sampled.warning()
    assert sampled.warning() is None


@pytest.fixture
def visible(monkeypatch):
    """Have torch show one GPU of that UUID, and NVML be the fake."""

    def show(nvml):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
        monkeypatch.setattr(gpu, "pynvml", nvml)
        return torch.device("cuda")

    return show


def test_the_thread_samples_and_ends_with_the_run(visible):
    nvml = FakeNvml()
    with sampled_gpu(visible(nvml), is_main=True) as device:
        thread = device._thread
        assert thread.daemon
        assert nvml.is_open
    assert not thread.is_alive()
    assert not nvml.is_open
    assert device.columns["gpu_utilization"] == 0.87


@pytest.mark.parametrize(
    "fails",
    [
        {"nvmlInit": pynvml.NVML_ERROR_DRIVER_NOT_LOADED},
        {"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND},
        {"nvmlDeviceGetHandleByUUID": pynvml.NVML_ERROR_NO_PERMISSION},
    ],
)
def test_gpu_columns_are_empty_without_a_driver_and_without_a_warning(visible, fails):
    with sampled_gpu(visible(FakeNvml(fails=fails)), is_main=True) as device:
        assert type(device) is DeviceColumns
        assert device.columns == {}
        assert device.warning() is None


def test_gpu_columns_are_empty_without_the_nvml_package(visible):
    class Absent:
        def __getattr__(self, name):
            raise ModuleNotFoundError("No module named 'pynvml'")

    with sampled_gpu(visible(Absent()), is_main=True) as device:
        assert type(device) is DeviceColumns


@pytest.mark.parametrize(("name", "is_main"), [("cpu", True), ("cuda", False)])
def test_only_the_main_rank_asks_and_only_about_a_gpu(name, is_main):
    with sampled_gpu(torch.device(name), is_main=is_main) as device:
        assert type(device) is DeviceColumns


class TestOnAGpu:
    pytestmark = ON_GPU

    def test_this_gpu_is_found_by_its_uuid_and_reports_its_memory(self):
        kept = torch.ones(64 << 20, device="cuda")
        with sampled_gpu(torch.device("cuda", 0), is_main=True) as device:
            assert isinstance(device, GpuSampler)
            assert device.sample()
            assert device.columns["gpu_memory_used_bytes"] > kept.nbytes
            assert set(device.columns) <= set(COLUMNS)
