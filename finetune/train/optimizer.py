"""The update rule, over the parameters that learn."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.optimization import Adafactor

from finetune.config.sections.train import OptimizerSection
from finetune.errors import ModelError
from finetune.runtime.optional import require
from finetune.runtime.parameters import full_shape


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection, *, learning_rate: float
) -> torch.optim.Optimizer:
    """Return the optimizer over the trained parameters; raises ModelError when nothing is trained."""
    groups = decay_groups(named_parameters, section.weight_decay)
    if not groups:
        raise ModelError("no parameter is trained: everything is frozen. Loosen model.freeze or set model.lora.")
    if section.name == "adamw":
        return torch.optim.AdamW(groups, lr=learning_rate, betas=_pair(section), eps=section.eps, fused=_fused(section))
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate, momentum=section.momentum)
    if section.name == "adafactor":
        return _adafactor(groups, learning_rate)
    return _adamw_8bit(groups, section, learning_rate)


def decay_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups: matrices decay, biases, norms and other vectors do not; empty groups are left out."""
    trained = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    matrices = [parameter for parameter in trained if len(full_shape(parameter)) >= 2]
    vectors = [parameter for parameter in trained if len(full_shape(parameter)) < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Give every group of the (prepared) optimizer this rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def _pair(section: OptimizerSection) -> tuple[float, float]:
    first, second = section.betas
    return first, second


def _fused(section: OptimizerSection) -> bool:
    return True if section.fused is None else section.fused


def _adafactor(groups: list[dict[str, Any]], learning_rate: float) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = Adafactor(
        groups, lr=learning_rate, scale_parameter=False, relative_step=False, warmup_init=False
    )
    return optimizer


def _adamw_8bit(groups: list[dict[str, Any]], section: OptimizerSection, learning_rate: float) -> torch.optim.Optimizer:
    if not torch.cuda.is_available():
        raise ModelError("train.optimizer.name: adamw_8bit needs a CUDA GPU and none was found. Write adamw.")
    bitsandbytes = require("bitsandbytes", extra="quantization", purpose="train.optimizer.name: adamw_8bit")
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
        groups, lr=learning_rate, betas=_pair(section), eps=section.eps
    )
    return optimizer
