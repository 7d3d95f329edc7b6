"""A GPU is read in the background; what goes wrong there never stops a run."""

import time

import pytest
import torch

from finetune.report import gpu
from finetune.report.gpu import COLUMNS, read_gpu, sampled_gpu
from tests.devices import ON_GPU

CUDA = torch.device("cuda", 0)


def fail(device):
    raise RuntimeError("NVML_ERROR_NOT_SUPPORTED")


@pytest.fixture
def reads(monkeypatch):
    """Have the GPU report these values, or fail."""

    def show(*readers):
        units = [factor for _, factor in gpu._READERS.values()]
        monkeypatch.setattr(gpu, "_READERS", dict(zip(COLUMNS, zip(readers, units, strict=True), strict=True)))

    return show


def test_every_column_is_in_its_unit_and_what_a_gpu_does_not_report_is_left_out(reads):
    reads(lambda _: 87, fail, lambda _: 61, lambda _: 70 << 30)
    expected = {"gpu_utilization": 0.87, "gpu_temperature_celsius": 61.0, "gpu_memory_used_bytes": float(70 << 30)}
    assert read_gpu(CUDA) == expected
    reads(fail, fail, fail, fail)
    assert read_gpu(CUDA) == {}


@pytest.mark.parametrize(
    ("device", "is_main", "expected"), [(CUDA, True, {"gpu_power_watts": 412.5}), (CUDA, False, {}), ("cpu", True, {})]
)
def test_only_the_main_rank_samples_and_only_a_gpu(reads, device, is_main, expected):
    reads(fail, lambda _: 412_500, fail, fail)
    with sampled_gpu(torch.device(device), is_main=is_main) as sampled:
        deadline = time.monotonic() + 30
        while sampled.columns != expected and time.monotonic() < deadline:
            time.sleep(0.01)
    assert sampled.columns == expected


class TestOnAGpu:
    pytestmark = ON_GPU

    def test_this_gpu_reports_its_memory(self):
        kept = torch.ones(64 << 20, device="cuda")
        columns = read_gpu(CUDA)
        assert columns["gpu_memory_used_bytes"] > kept.nbytes and set(columns) <= set(COLUMNS)
