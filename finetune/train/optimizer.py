"""The update rule, over the parameters that learn."""

from collections.abc import Sequence
from typing import Any

import torch

from finetune.config.sections.train import AverageSection, OptimizerSection, UnfreezeSection
from finetune.errors import ModelError
from finetune.runtime.lazy import lazily
from finetune.runtime.optional import require
from finetune.train.average import begin_average, keep_average
from finetune.train.groups import BEGINS_AFTER, FACTOR, WAITS, Named, parameter_groups
from finetune.train.low_bit import LowBitAdamW, with_keys
from finetune.train.muon import MuonAndAdamW, split_for_muon
from finetune.train.schedule_free import ScheduleFreeAdamW

with lazily():
    from transformers import optimization

Groups = list[dict[str, Any]]


def build_optimizer(
    named: Sequence[Named],
    section: OptimizerSection,
    *,
    learning_rate: float,
    unfreeze: Sequence[UnfreezeSection] = (),
    average: AverageSection | None = None,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Return the optimizer over the trained parameters; raises ModelError when nothing is trained.

    It leaves alone what is to begin later, and keeps an average of the weights where one is asked for. `seed` is where
    the chance comes from by which some round.
    """
    groups = parameter_groups(named, section, unfreeze)
    if not groups:
        raise ModelError("no parameter is trained: everything is frozen. Loosen model.freeze or set model.lora.")
    if section.in_backward:
        groups = one_by_one(groups)
    if _is_low_bit(named, section):
        optimizer = _low_bit(with_keys(groups, named, seed=seed), section, learning_rate)
    else:
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


def rounds_by_place(section: OptimizerSection, *, dtype: str) -> bool:
    """Tell whether AdamW is to be ours, which rounds, for weights of this type."""
    return section.stochastic_rounding or section.state_dtype not in (None, dtype)


def one_by_one(groups: Groups) -> Groups:
    """Return the groups, each cut into groups of one parameter."""
    return [{**group, "params": [parameter]} for group in groups for parameter in group["params"]]


def _is_low_bit(named: Sequence[Named], section: OptimizerSection) -> bool:
    """Tell whether the moments' type is not that of all weights that learn, or weights are rounded by chance."""
    trained = {str(each.parameter.dtype).removeprefix("torch.") for each in named if each.parameter.requires_grad}
    return any(rounds_by_place(section, dtype=dtype) for dtype in trained)


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


def _low_bit(groups: Groups, section: OptimizerSection, learning_rate: float) -> torch.optim.Optimizer:
    return LowBitAdamW(
        groups,
        learning_rate=learning_rate,
        betas=_pair(section),
        eps=section.eps,
        state_dtype=getattr(torch, section.state_dtype) if section.state_dtype else None,
        rounds_weights=section.stochastic_rounding,
    )


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
    optimizer: torch.optim.Optimizer = optimization.Adafactor(
        groups, lr=learning_rate, scale_parameter=False, relative_step=False, warmup_init=False
    )
    return optimizer


def _adamw_8bit(groups: Groups, section: OptimizerSection, learning_rate: float) -> torch.optim.Optimizer:
    bitsandbytes = require("bitsandbytes", extra="quantization", purpose="train.optimizer.name: adamw_8bit")
    if not torch.cuda.is_available() and not _is_on_cpu("bitsandbytes::optimizer_update_8bit_blockwise"):
        raise ModelError(
            f"train.optimizer.name: adamw_8bit needs a CUDA GPU and none was found: bitsandbytes "
            f"{bitsandbytes.__version__} has it for no CPU. Write `name: adamw` with `state_dtype: int8`."
        )
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
        groups, lr=learning_rate, betas=_pair(section), eps=section.eps
    )
    return optimizer


def _is_on_cpu(operator: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CPU")
