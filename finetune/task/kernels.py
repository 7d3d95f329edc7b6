"""Others' kernels for the summed cross-entropy of a linear head, on CUDA; both hold no logits of all targets.

Read in liger-kernel 0.8.5 and cut-cross-entropy 25.1.1. Both wait for the device once a call to count targets, which
our own loss over slabs does not: that is why none of them is ever chosen unasked.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from finetune.config.sections.train import LossKernel
from finetune.runtime.optional import require
from finetune.task.head_output import Finish

MODULES = {"liger": "liger_kernel.transformers.functional", "cce": "cut_cross_entropy"}

Kernel = Callable[[Tensor, Tensor, Tensor | None, Tensor, Finish], Tensor]
"""From hidden states [targets, hidden], weight, bias and labels to the summed cross-entropy, a scalar."""


def usable(kernel: LossKernel) -> tuple[LossKernel, tuple[str, ...]]:
    """Return the kernel that serves here and, where that is not the one asked for, a line that tells why.

    Raises MissingPackage where there is a GPU for it, but not the package.
    """
    if kernel not in MODULES:
        return kernel, ()
    if not torch.cuda.is_available():
        return "chunked", (f"warning: train.loss_kernel: `{kernel}` needs a CUDA GPU; `chunked` is used.",)
    require(MODULES[kernel], extra="kernels", purpose=f"`train.loss_kernel: {kernel}`")
    return kernel, ()


def kernel_for(kernel: LossKernel, rows: Tensor, bias: Tensor | None) -> Kernel | None:
    """Return the kernel asked for where it knows such a head; None where our own loss serves instead."""
    if kernel not in MODULES or not rows.is_cuda or not len(rows) or (kernel == "cce" and bias is not None):
        return None
    return _liger if kernel == "liger" else _cce


def _liger(rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, finish: Finish) -> Tensor:
    function: Any = require(MODULES["liger"], extra="kernels", purpose="`train.loss_kernel: liger`")
    settings = {"reduction": "sum", "softcap": finish.cap, "accum_dtype": torch.float32}
    bias = None if bias is None else _scaled(bias, finish)
    return _sum(function.liger_fused_linear_cross_entropy(_scaled(rows, finish), weight, labels, bias, **settings))


def _cce(rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, finish: Finish) -> Tensor:
    """Return the sum; gradients of unlikely tokens are not left out (`filter_eps`)."""
    package: Any = require(MODULES["cce"], extra="kernels", purpose="`train.loss_kernel: cce`")
    settings = {"reduction": "sum", "softcap": finish.cap, "filter_eps": None}
    return _sum(package.linear_cross_entropy(_scaled(rows, finish), weight, labels, **settings))


def _scaled(values: Tensor, finish: Finish) -> Tensor:
    return values if finish.scale == 1.0 else values * finish.scale


def _sum(loss: Any) -> Tensor:
    summed: Tensor = loss.to(torch.float32)
    return summed
