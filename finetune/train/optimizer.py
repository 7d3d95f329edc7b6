"""The update rule, over the parameters that learn."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.optimization import Adafactor

from finetune.config.sections.train import AverageSection, OptimizerSection, UnfreezeSection
from finetune.errors import ModelError
from finetune.runtime.optional import require
from finetune.train.average import begin_average, keep_average
from finetune.train.groups import BEGINS_AFTER, FACTOR, WAITS, Named, parameter_groups
from finetune.train.muon import MuonAndAdamW, split_for_muon
from finetune.train.schedule_free import ScheduleFreeAdamW

Groups = list[dict[str, Any]]


def build_optimizer(
    named: Sequence[Named],
    section: OptimizerSection,
    *,
    learning_rate: float,
    unfreeze: Sequence[UnfreezeSection] = (),
    average: AverageSection | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer over the trained parameters; raises ModelError when nothing is trained.

    It leaves alone what is to begin later, and keeps an average of the weights where one is asked for.
    """
    groups = parameter_groups(named, section, unfreeze)
    if not groups:
        raise ModelError("no parameter is trained: everything is frozen. Loosen model.freeze or set model.lora.")
    optimizer = _build(named, groups, section, learning_rate)
    if unfreeze:
        optimizer.register_step_pre_hook(lambda optimizer, *_: leave_out_waiting(optimizer))
    if average is not None:
        keep_average(optimizer, average)
    return optimizer


def begin_step(optimizer: Any, *, step: int, learning_rate: float) -> None:
    """Set every group of the (prepared) optimizer for the update that follows `step` steps: all pure functions of it.

    A group learns at its factor times the rate, or not at all before it begins.
    """
    for group in optimizer.param_groups:
        group[WAITS] = step < group.get(BEGINS_AFTER, 0)
        group["lr"] = 0.0 if group[WAITS] else learning_rate * group.get(FACTOR, 1.0)
        begin_average(group, step=step)


def leave_out_waiting(optimizer: Any) -> None:
    """Forget the gradients of groups that have not begun to learn: no norm and no moment knows of them.

    ZeRO's lie elsewhere until its inner optimizer's step; there a hook calls this, and `strategy/waiting.py` sees to
    the norm.
    """
    for group in optimizer.param_groups:
        if group.get(WAITS):
            for parameter in group["params"]:
                parameter.grad = None


def _build(
    named: Sequence[Named], groups: Groups, section: OptimizerSection, learning_rate: float
) -> torch.optim.Optimizer:
    if section.name == "adamw":
        return torch.optim.AdamW(groups, lr=learning_rate, betas=_pair(section), eps=section.eps, fused=_fused(section))
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate, momentum=section.momentum or 0.0)
    if section.name == "adafactor":
        return _adafactor(groups, learning_rate)
    if section.name == "muon":
        return _muon(named, groups, section, learning_rate)
    if section.name == "schedule_free_adamw":
        return ScheduleFreeAdamW(groups, learning_rate=learning_rate, betas=_pair(section), eps=section.eps)
    return _adamw_8bit(groups, section, learning_rate)


def _pair(section: OptimizerSection) -> tuple[float, float]:
    first, second = section.betas
    return first, second


def _fused(section: OptimizerSection) -> bool:
    return True if section.fused is None else section.fused


def _muon(
    named: Sequence[Named], groups: Groups, section: OptimizerSection, learning_rate: float
) -> torch.optim.Optimizer:
    return MuonAndAdamW(
        split_for_muon(groups, named),
        learning_rate=learning_rate,
        momentum=0.95 if section.momentum is None else section.momentum,
        betas=_pair(section),
        eps=section.eps,
        fused=_fused(section),
    )


def _adafactor(groups: Groups, learning_rate: float) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = Adafactor(
        groups, lr=learning_rate, scale_parameter=False, relative_step=False, warmup_init=False
    )
    return optimizer


def _adamw_8bit(groups: Groups, section: OptimizerSection, learning_rate: float) -> torch.optim.Optimizer:
    if not torch.cuda.is_available():
        raise ModelError("train.optimizer.name: adamw_8bit needs a CUDA GPU and none was found. Write adamw.")
    bitsandbytes = require("bitsandbytes", extra="quantization", purpose="train.optimizer.name: adamw_8bit")
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
        groups, lr=learning_rate, betas=_pair(section), eps=section.eps
    )
    return optimizer
