"""AdamW with quantized or paged moments, as bitsandbytes and torchao implement it.

8-bit moments: Dettmers et al., 2021, arXiv:2110.02861. 4-bit moments: Li et al., 2023, arXiv:2309.01507. Paged moments:
Dettmers et al., 2023, arXiv:2305.14314; CUDA moves them to the memory of the host while the GPU needs their space.
"""

from typing import Any

import torch

from finetune.errors import ModelError
from finetune.runtime.optional import require
from finetune.train.optim.optimizers import OptimizerInputs


def adamw_8bit(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return bitsandbytes' 8-bit AdamW; raises MissingPackage if it is missing, ModelError on unsupported devices."""
    bitsandbytes = _bitsandbytes(inputs)
    operator = "bitsandbytes::optimizer_update_8bit_blockwise"
    if not torch.cuda.is_available() and not torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CPU"):
        raise ModelError(
            f"train.optimizer.name: adamw_8bit needs a CUDA GPU and none was found: bitsandbytes "
            f"{bitsandbytes.__version__} does not support it on CPUs. Write `name: adamw` with `state_dtype: int8`."
        )
    return _build(bitsandbytes.optim.AdamW8bit, inputs)


def paged_adamw(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW with float32 moments in paged memory; raises MissingPackage, or ModelError on CPUs."""
    return _paged("PagedAdamW", inputs)


def paged_adamw_8bit(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW with 8-bit moments in paged memory; raises MissingPackage, or ModelError on CPUs."""
    return _paged("PagedAdamW8bit", inputs)


def adamw_4bit(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return torchao's AdamW with 4-bit moments; raises MissingPackage if torchao is not installed.

    Parameters of fewer than 4,096 elements, or whose number of elements is not a multiple of 128, keep moments in full.
    The first step compiles the update: with triton on a GPU, with a C++ compiler on a CPU.
    """
    torchao_optim = require("torchao.optim", extra="torchao", purpose="train.optimizer.name: adamw_4bit")
    return _build(torchao_optim.AdamW4bit, inputs)


def _paged(class_name: str, inputs: OptimizerInputs) -> torch.optim.Optimizer:
    bitsandbytes = _bitsandbytes(inputs)
    if not torch.cuda.is_available():
        raise ModelError(
            f"train.optimizer.name: {inputs.section.name} needs a CUDA GPU, whose driver moves the pages, and none was "
            "found. Write `name: adamw`."
        )
    return _build(getattr(bitsandbytes.optim, class_name), inputs)


def _bitsandbytes(inputs: OptimizerInputs) -> Any:
    return require("bitsandbytes", extra="quantization", purpose=f"train.optimizer.name: {inputs.section.name}")


def _build(optimizer_class: Any, inputs: OptimizerInputs) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = optimizer_class(
        inputs.groups, lr=inputs.learning_rate, betas=inputs.betas, eps=inputs.section.eps
    )
    return optimizer
