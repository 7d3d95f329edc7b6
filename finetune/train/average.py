"""A moving average of the weights, kept as optimizer state beside the moments: wherever those lie, it lies too.

An optimizer's own hooks keep it, so its class stays what it is, and every strategy that splits its state (ZeRO's fp32
partitions, FSDP2's rows) splits the average alike.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from finetune.config.sections.train import AverageSection
from finetune.runtime.average import DECAY, STATE

AFTER, KEPT = "average_after", "average_kept"


def keep_average(optimizer: torch.optim.Optimizer, section: AverageSection) -> None:
    """Have the optimizer keep average = decay * average + (1 - decay) * weights after each of its updates.

    It is the weights themselves until `after_steps` steps are done; `begin_average` says how many are.
    """
    first: dict[Tensor, Tensor] = {}

    def remember(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in _updated(optimizer):
            if STATE not in optimizer.state.get(parameter, {}):
                first[parameter] = parameter.detach().to(torch.float32, copy=True)

    @torch.no_grad()
    def follow(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = optimizer.state[parameter]
                    if parameter in first:
                        state[STATE] = first.pop(parameter)
                    share = _share(optimizer, kept=group[DECAY], like=parameter)
                    _local(state[STATE]).lerp_(_local(parameter).to(torch.float32), share)

    for group in optimizer.param_groups:
        group.update({DECAY: 0.0, AFTER: section.after_steps, KEPT: section.decay})
    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(follow)


def begin_average(group: dict[str, Any], *, step: int) -> None:
    """Tell a group that keeps an average that the update which follows `step` steps is next."""
    if DECAY in group:
        group[DECAY] = group[KEPT] if step >= group[AFTER] else 0.0


def _share(optimizer: Any, *, kept: float, like: Tensor) -> float | Tensor:
    """Return the share of the weights in the new average: none after an update that fp16's overflow has prevented.

    A fused optimizer is stepped all the same and looks at the same flag, on the device (`torch.amp.GradScaler`).
    """
    overflow: Tensor | None = getattr(optimizer, "found_inf", None)
    return 1.0 - kept if overflow is None else (1.0 - kept) * (1.0 - overflow.to(like.device))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _updated(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
