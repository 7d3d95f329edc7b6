"""TF32 is a choice that is made and said once."""

import warnings

import pytest
import torch

from finetune.errors import UserError
from finetune.run.setup import accelerator
from finetune.run.setup.accelerator import has_tf32, set_tf32
from tests.devices import ON_GPU
from tests.refusals import refused

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def switches():
    """Leave torch's switches as they were."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def state():
    """Return what everyone who looks at the switches sees: torch's compiler, the autotuner, other libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        readers = (
            torch.get_float32_matmul_precision() == "high",
            torch.backends.cuda.matmul.fp32_precision == "tf32",
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cudnn.conv.fp32_precision == "tf32",
        )
    assert len(set(readers)) == 1, readers
    return readers[0]


@pytest.mark.parametrize(
    ("wanted", "is_deterministic", "is_on"),
    [(None, False, True), (None, True, False), (True, True, True), (True, False, True), (False, False, False)],
)
def test_tf32_is_enabled_on_supported_gpus_unless_the_run_is_deterministic(
    monkeypatch, wanted, is_deterministic, is_on
):
    monkeypatch.setattr(accelerator, "has_tf32", lambda device: True)
    assert set_tf32(wanted, CPU, is_deterministic=is_deterministic) is is_on
    assert state() is is_on


def test_tf32_on_a_device_without_it_is_rejected_and_auto_changes_nothing():
    before = torch.get_float32_matmul_precision()
    assert not has_tf32(CPU)
    for wanted in (None, False):
        assert not set_tf32(wanted, CPU, is_deterministic=False)
    with refused(UserError, "train.tf32: `true`", "`cpu`", "`auto`"):
        set_tf32(True, CPU, is_deterministic=False)
    assert torch.get_float32_matmul_precision() == before


class TestOnGpu:
    """What the switch does."""

    pytestmark = ON_GPU

    def test_products_are_faster_and_rounded(self, figure):
        device = torch.device("cuda")
        one, other = (torch.randn(8192, 8192, device=device) for _ in range(2))
        seconds, results = {}, {}
        for wanted in (False, True):
            set_tf32(wanted, device, is_deterministic=False)
            one @ other
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(5):
                results[wanted] = one @ other
            end.record()
            end.synchronize()
            seconds[wanted] = start.elapsed_time(end)
        assert not torch.equal(results[True], results[False])
        figure("float32 products with TF32 over without, speed", seconds[False] / seconds[True], at_least=3)
