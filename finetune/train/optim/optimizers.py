"""The optimizer over the trained parameters.

Muon (Jordan et al., 2024) is for hidden matrices, AdamW for the rest, both as one optimizer. Muon makes a matrix's
momentum orthogonal before it is applied. Scaled to the root mean square of AdamW's updates (Liu et al., 2025,
arXiv:2502.16982), it trains with AdamW's learning rate and weight decay, so one rate serves both. torch has the rule
for matrices alone (`torch.optim.Muon`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from finetune.config.sections.train import AverageSection, OptimizerSection, UnfreezeSection
from finetune.errors import ModelError
from finetune.model.compilation import missing_triton_toolchain
from finetune.registry.optimizers import OPTIMIZERS
from finetune.runtime.optional import lazily, require
from finetune.runtime.parameters import NOT_YET_UNFROZEN, full_shape
from finetune.train.optim.averages import ScheduleFreeAdamW, keep_average, set_average_decay
from finetune.train.optim.low_bit import LowBitAdamW, add_rounding_keys, set_rounding_step
from finetune.train.optim.parameter_groups import (
    RATE_FACTOR,
    UNFREEZE_AFTER,
    NamedParameter,
    is_embedding,
    layer_of,
    parameter_groups,
)

with lazily():
    import transformers.optimization as optimization

IS_MUON = "is_muon"
"""The key of a group that tells whether Muon or AdamW updates it."""


class MuonAndAdamW(torch.optim.Optimizer):
    """Steps each group by the rule that it names; the state of both is here, under torch's own words."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        learning_rate: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool,
    ) -> None:
        of_muon = [group for group in groups if group[IS_MUON]]
        others = [group for group in groups if not group[IS_MUON]]
        rules: list[torch.optim.Optimizer] = [
            torch.optim.Muon(of_muon, lr=learning_rate, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        ]
        if others:
            rules.append(torch.optim.AdamW(others, lr=learning_rate, betas=betas, eps=eps, fused=fused))
        super().__init__([group for rule in rules for group in rule.param_groups], {"lr": learning_rate})
        self._rules = rules

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for rule in self._rules:
            is_muon = isinstance(rule, torch.optim.Muon)
            # Both may have been replaced since: FSDP and Accelerate put others in their place.
            rule.param_groups = [group for group in self.param_groups if group[IS_MUON] == is_muon]
            rule.state = self.state
            rule.step()


def split_for_muon(groups: Sequence[dict[str, Any]], named: Sequence[NamedParameter]) -> list[dict[str, Any]]:
    """Return the groups, each split into hidden matrices and the rest; raises ModelError where no matrix is hidden.

    A matrix with two dimensions within a numbered layer is hidden; embeddings, heads, vectors, convolutions and experts
    stacked in one tensor are not.
    """
    hidden = {id(each.parameter) for each in named if _is_hidden_matrix(each)}
    split = [
        {**group, "params": chosen, IS_MUON: is_muon}
        for group in groups
        for is_muon in (True, False)
        if (chosen := [each for each in group["params"] if (id(each) in hidden) == is_muon])
    ]
    if not any(group[IS_MUON] for group in split):
        raise ModelError(
            "train.optimizer.name: muon is for matrices of numbered layers (`layers.0.`), and none of them is trained. "
            "Write adamw."
        )
    return split


def _is_hidden_matrix(each: NamedParameter) -> bool:
    is_matrix = len(full_shape(each.parameter)) == 2 and layer_of(each.name) is not None
    return is_matrix and not each.is_embedding and not any(map(is_embedding, each.aliases))


Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerInputs:
    """What an optimizer of the registry is built from."""

    named: Sequence[NamedParameter]
    groups: Groups  # with a weight decay each
    section: OptimizerSection
    learning_rate: float

    @property
    def betas(self) -> tuple[float, float]:
        """Return the decay rates of both moments."""
        first, second = self.section.betas
        return first, second

    @property
    def is_fused(self) -> bool:
        """Return whether the whole update is one kernel."""
        return True if self.section.fused is None else self.section.fused


def adamw(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return torch's AdamW."""
    return torch.optim.AdamW(
        inputs.groups, lr=inputs.learning_rate, betas=inputs.betas, eps=inputs.section.eps, fused=inputs.is_fused
    )


def sgd(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return torch's SGD."""
    return torch.optim.SGD(inputs.groups, lr=inputs.learning_rate, momentum=inputs.section.momentum or 0.0)


def adafactor(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return transformers' Adafactor with the learning rate of the schedule alone."""
    optimizer: torch.optim.Optimizer = optimization.Adafactor(
        inputs.groups, lr=inputs.learning_rate, scale_parameter=False, relative_step=False, warmup_init=False
    )
    return optimizer


def adamw_8bit(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW; raises MissingPackage without it, ModelError without a device that it supports."""
    bitsandbytes = require("bitsandbytes", extra="quantization", purpose="train.optimizer.name: adamw_8bit")
    if not torch.cuda.is_available() and not _is_on_cpu("bitsandbytes::optimizer_update_8bit_blockwise"):
        raise ModelError(
            f"train.optimizer.name: adamw_8bit needs a CUDA GPU and none was found: bitsandbytes "
            f"{bitsandbytes.__version__} has it for no CPU. Write `name: adamw` with `state_dtype: int8`."
        )
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
        inputs.groups, lr=inputs.learning_rate, betas=inputs.betas, eps=inputs.section.eps
    )
    return optimizer


def muon(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return Muon for hidden matrices and AdamW for the rest; raises ModelError where no matrix is hidden."""
    momentum = inputs.section.momentum
    return MuonAndAdamW(
        split_for_muon(inputs.groups, inputs.named),
        learning_rate=inputs.learning_rate,
        momentum=0.95 if momentum is None else momentum,
        betas=inputs.betas,
        eps=inputs.section.eps,
        fused=inputs.is_fused,
    )


def schedule_free_adamw(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return schedule-free AdamW; raises MissingPackage without its package."""
    return ScheduleFreeAdamW(
        inputs.groups, learning_rate=inputs.learning_rate, betas=inputs.betas, eps=inputs.section.eps
    )


def build_optimizer(
    named: Sequence[NamedParameter],
    section: OptimizerSection,
    *,
    learning_rate: float,
    unfreeze: Sequence[UnfreezeSection] = (),
    average: AverageSection | None = None,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Return the optimizer over the trained parameters; raises ModelError when nothing is trained.

    Parameters that are not yet unfrozen are skipped, and an average of the weights is kept if configured. `seed` is
    that of stochastic rounding.
    """
    groups = parameter_groups(named, section, unfreeze)
    if not groups:
        raise ModelError(
            "no parameter is trained: everything is frozen. Remove patterns from model.freeze, or set model.lora."
        )
    if section.in_backward:
        groups = one_group_per_parameter(groups)
    if _is_low_bit(named, section):
        optimizer = _low_bit(add_rounding_keys(groups, named, seed=seed), section, learning_rate)
    else:
        inputs = OptimizerInputs(named, groups, section, learning_rate)
        optimizer = cast(torch.optim.Optimizer, OPTIMIZERS.resolve(section.name)(inputs))
    if unfreeze:
        optimizer.register_step_pre_hook(lambda optimizer, *_: drop_not_yet_unfrozen(optimizer))
    if average is not None:
        keep_average(optimizer, average)
    return optimizer


def begin_step(optimizer: Any, *, step: int, learning_rate: float) -> None:
    """Set every group of the (prepared) optimizer for the update that follows `step` steps: all pure functions of it.

    The rate of a group is its factor times the rate, or 0 before it is unfrozen.
    """
    for group in optimizer.param_groups:
        group[NOT_YET_UNFROZEN] = step < group.get(UNFREEZE_AFTER, 0)
        group["lr"] = 0.0 if group[NOT_YET_UNFROZEN] else learning_rate * group.get(RATE_FACTOR, 1.0)
        set_average_decay(group, step=step)
        set_rounding_step(group, step=step)


def drop_not_yet_unfrozen(optimizer: Any) -> None:
    """Drop the gradients of groups that are not yet unfrozen, so that no norm and no moment includes them.

    ZeRO keeps its gradients elsewhere until the step of its inner optimizer; there a hook calls this, and
    the norm.
    """
    for group in optimizer.param_groups:
        if group.get(NOT_YET_UNFROZEN):
            for parameter in group["params"]:
                parameter.grad = None


def uses_low_bit_adamw(section: OptimizerSection, *, dtype: str) -> bool:
    """Return whether AdamW is to be ours, which rounds, for weights of this type."""
    return section.stochastic_rounding or section.state_dtype not in (None, dtype)


def slow_update_warning(optimizer: torch.optim.Optimizer) -> str | None:
    """Return a warning where the optimizer has a kernel for this machine's GPU that cannot be compiled."""
    if not isinstance(optimizer, LowBitAdamW) or not torch.cuda.is_available():
        return None
    missing = missing_triton_toolchain()
    if missing is None:
        return None
    return (
        "warning: train.optimizer: an update with rounded states or weights is one triton kernel per parameter, but "
        f"{missing}. Plain operators do the same with about 60 kernels, several times slower."
    )


def one_group_per_parameter(groups: Groups) -> Groups:
    """Return the groups, each cut into groups of one parameter."""
    return [{**group, "params": [parameter]} for group in groups for parameter in group["params"]]


def _is_low_bit(named: Sequence[NamedParameter], section: OptimizerSection) -> bool:
    """Return whether the moments' dtype is not that of all trained weights, or weights are rounded stochastically."""
    trained = {str(each.parameter.dtype).removeprefix("torch.") for each in named if each.parameter.requires_grad}
    return any(uses_low_bit_adamw(section, dtype=dtype) for dtype in trained)


def _low_bit(groups: Groups, section: OptimizerSection, learning_rate: float) -> torch.optim.Optimizer:
    return LowBitAdamW(
        groups,
        learning_rate=learning_rate,
        betas=(section.betas[0], section.betas[1]),
        eps=section.eps,
        state_dtype=getattr(torch, section.state_dtype) if section.state_dtype else None,
        rounds_weights=section.stochastic_rounding,
    )


def _is_on_cpu(operator: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CPU")
