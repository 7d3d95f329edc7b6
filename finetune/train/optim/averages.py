"""Averages of the weights: an exponential moving average kept as optimizer state, and schedule-free AdamW's average.

The moving average is stored with the optimizer's moments, so every strategy that shards optimizer state (ZeRO's fp32
partitions, FSDP2's rows) shards the average, too. It is updated in optimizer hooks, so the optimizer's class does not
change.

In schedule-free AdamW (Defazio et al., 2024, arXiv:2405.15682) the trained weights y interpolate between a fast
sequence z and its average x, which is evaluated and needs no schedule. The update rule is the authors' own (package
`schedulefree`); here its counters are kept per parameter instead of per group, as plain numbers in the optimizer
state, so that they are saved by name and remain correct where a strategy steps some groups at a time (ZeRO).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from finetune.config.sections.train import AverageSection
from finetune.runtime.optional import require
from finetune.runtime.parameters import AVERAGE, AVERAGE_DECAY, local_tensor

INITIAL_COUNTS = {"step": 0, "weight_sum": 0.0, "lr_max": -1.0}
"""The counters before the first update: updates, sum of the average's weights, highest learning rate."""


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """The package's update rule; instead of its `train` and `eval`, `train.evaluate.average_formula` is used."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        package = require("schedulefree", extra="optimizers", purpose="train.optimizer.name: schedule_free_adamw")
        self._rule = package.AdamWScheduleFree([torch.zeros(())], lr=learning_rate, betas=betas, eps=eps)
        super().__init__(groups, {**self._rule.defaults, "train_mode": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        self._rule.state = self.state
        for group in self.param_groups:
            by_counts: dict[tuple[Any, ...], list[Tensor]] = {}  # the parameters with a gradient, by equal counters
            for parameter in group["params"]:
                if parameter.grad is not None:
                    own = self.state[parameter]
                    key = tuple(own.get(name, initial) for name, initial in INITIAL_COUNTS.items())
                    by_counts.setdefault(key, []).append(parameter)
            for values, parameters in by_counts.items():
                counts = dict(zip(INITIAL_COUNTS, values, strict=True))
                is_plain = not any(isinstance(parameter, DTensor) for parameter in parameters)
                one = {**group, "params": parameters, "foreach": is_plain, "k": counts["step"], **counts}
                self._rule.param_groups = [one]
                self._rule.step()
                for parameter in parameters:
                    self.state[parameter].update(step=one["k"], weight_sum=one["weight_sum"], lr_max=one["lr_max"])


STARTS_AFTER, CONFIGURED_DECAY = "average_after", "average_kept"
"""Keys of a parameter group: the number of steps before the average starts, and its decay from then on."""


def keep_average(optimizer: torch.optim.Optimizer, section: AverageSection) -> None:
    """Register hooks that update average = decay * average + (1 - decay) * weights after every optimizer step.

    The average equals the weights for the first `after_steps` steps; `begin_step` sets the decay of each step.
    """
    first: dict[Tensor, Tensor] = {}

    def remember(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is not None and AVERAGE not in optimizer.state.get(parameter, {}):
                first[parameter] = parameter.detach().to(torch.float32, copy=True)

    @torch.no_grad()
    def follow(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # 1 if an fp16 overflow skipped a fused optimizer's update, whose `step` is called nevertheless and reads the
        # same flag on the device (`torch.amp.GradScaler`).
        overflow: Tensor | None = getattr(optimizer, "found_inf", None)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = optimizer.state[parameter]
                    if parameter in first:
                        state[AVERAGE] = first.pop(parameter)
                    share: float | Tensor = 1.0 - group[AVERAGE_DECAY]
                    if overflow is not None:
                        share = share * (1.0 - overflow.to(parameter.device))
                    local_tensor(state[AVERAGE]).lerp_(local_tensor(parameter).to(torch.float32), share)

    for group in optimizer.param_groups:
        group.update({AVERAGE_DECAY: 0.0, STARTS_AFTER: section.after_steps, CONFIGURED_DECAY: section.decay})
    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(follow)
