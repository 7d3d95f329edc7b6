"""Others' kernels: told when they cannot serve, and called as they are written (0.8.5 and 25.1.1)."""

import sys
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from finetune.errors import MissingPackage
from finetune.registry.losses import LOSS_KERNELS
from finetune.task.lm_loss import target_loss
from finetune.task.lm_loss.logit_transform import LogitTransform
from finetune.task.lm_loss.target_loss import fused_kernel_for, resolve_kernel
from tests.refusals import refused

ROWS, WEIGHT, BIAS = torch.randn(5, 8), torch.randn(11, 8), torch.randn(11)
LABELS = torch.tensor([0, 3, 10, 2, 2])


def liger_fused_linear_cross_entropy(
    input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
    return_token_accuracy=False, return_predicted_tokens=False, chunk_mem_const=1,
):  # fmt: skip
    assert accum_dtype == torch.float32
    return functional.cross_entropy(
        LogitTransform(soft_cap=softcap).apply(functional.linear(input, weight, bias)), target, reduction=reduction
    )


def linear_cross_entropy(
    e, c, targets, ignore_index=-100, softcap=None, reduction="mean", shift=False, filter_eps="high", impl="cce"
):  # fmt: skip
    assert filter_eps is None  # gradients are exact
    return functional.cross_entropy(LogitTransform(soft_cap=softcap).apply(e @ c.t()), targets, reduction=reduction)


@pytest.fixture
def installed(monkeypatch):
    for name, function in (("liger", liger_fused_linear_cross_entropy), ("cce", linear_cross_entropy)):
        module = ModuleType(LOSS_KERNELS[name].module)
        setattr(module, function.__name__, function)
        for depth in range(1, len(LOSS_KERNELS[name].module.split("."))):
            parent = ".".join(LOSS_KERNELS[name].module.split(".")[:depth])
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, LOSS_KERNELS[name].module, module)


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(scale=0.5, soft_cap=2.0)])
@pytest.mark.parametrize(
    ("kernel", "bias"), [(target_loss.liger, BIAS), (target_loss.liger, None), (target_loss.cce, None)]
)
def test_a_kernel_gets_the_inputs_that_give_the_logits_of_the_model(installed, kernel, bias, transform):
    wanted = functional.cross_entropy(transform.apply(functional.linear(ROWS, WEIGHT, bias)), LABELS, reduction="sum")
    torch.testing.assert_close(kernel(ROWS, WEIGHT, bias, LABELS, transform), wanted)


def test_the_chunked_loss_replaces_gpu_kernels_on_a_cpu_with_a_warning(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kernel, (line,) = resolve_kernel("liger")
    assert kernel == "chunked"
    assert "`liger` needs a CUDA GPU; `chunked` is used" in line
    assert resolve_kernel("auto") == ("auto", ())


def test_a_missing_kernel_package_is_named_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
    with refused(MissingPackage, "finetune-accelerate[kernels]"):
        resolve_kernel("cce")


def test_rows_elsewhere_than_on_a_gpu_have_no_kernel():
    assert fused_kernel_for("liger", ROWS, None) is None
    assert fused_kernel_for("chunked", ROWS, None) is None
