"""Schedule-free AdamW (Defazio et al., 2024, arXiv:2405.15682): what is evaluated is an average that needs no schedule.

The weights that learn, y, lie between a fast sequence z and its average x. The rule is the authors' own (package
`schedulefree`); here its counts are kept by parameter instead of by group, as plain numbers of the optimizer's state,
so that they are saved by name and hold where a strategy steps a part of the groups at a time (ZeRO).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from finetune.runtime.optional import require

FIRST = {"step": 0, "weight_sum": 0.0, "lr_max": -1.0}
"""The counts before the first update: updates, sum of the average's weights, highest learning rate."""

FAST = "z"
"""The key of the fast sequence among a parameter's optimizer state."""


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """The package's rule; its `train` and `eval` are not used: `average_of` is asked for instead."""

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
            for counts, parameters in _alike(self.state, group["params"]):
                is_plain = not any(isinstance(each, DTensor) for each in parameters)
                one = {**group, "params": parameters, "foreach": is_plain, "k": counts["step"], **counts}
                self._rule.param_groups = [one]
                self._rule.step()
                for parameter in parameters:
                    self.state[parameter].update(step=one["k"], weight_sum=one["weight_sum"], lr_max=one["lr_max"])


def average_of(weights: Tensor, fast: Tensor, *, beta: float) -> Tensor:
    """Return x where y = `weights` lies between it and z = `fast`: y = beta * x + (1 - beta) * z."""
    return weights.lerp(fast, 1.0 - 1.0 / beta)


def _alike(state: Any, parameters: Sequence[Tensor]) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
    """Yield the parameters that have a gradient, those with equal counts together."""
    found: dict[tuple[Any, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            own = state[parameter]
            found.setdefault(tuple(own.get(name, first) for name, first in FIRST.items()), []).append(parameter)
    for counts, alike in found.items():
        yield dict(zip(FIRST, counts, strict=True)), alike
