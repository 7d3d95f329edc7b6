"""Lion (Chen et al., 2023, arXiv:2302.06675): the sign of an interpolated momentum, with one moment per parameter.

The update is elementwise, so each rank updates its own shard of a parameter, however it is sharded.
"""

from collections.abc import Sequence
from typing import Any

import torch

from finetune.runtime.parameters import local_tensor
from finetune.train.optim.optimizers import OptimizerInputs

MOMENT = "exp_avg"
"""The key of the momentum in a parameter's optimizer state."""


class Lion(torch.optim.Optimizer):
    """Moves every weight by the learning rate in the direction of the sign of its interpolated momentum."""

    def __init__(self, groups: Sequence[dict[str, Any]], *, learning_rate: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": learning_rate, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient: algorithm 2 of the paper."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if MOMENT not in self.state[parameter]:
                    self.state[parameter][MOMENT] = torch.zeros_like(parameter)
            if not parameters:
                continue
            weights = [local_tensor(parameter) for parameter in parameters]
            gradients = [local_tensor(parameter.grad) for parameter in parameters]
            moments = [local_tensor(self.state[parameter][MOMENT]) for parameter in parameters]
            first, second = group["betas"]
            directions = torch._foreach_lerp(moments, gradients, 1.0 - first)
            torch._foreach_sign_(directions)
            torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, directions, alpha=-group["lr"])
            torch._foreach_lerp_(moments, gradients, 1.0 - second)


def lion(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return Lion over the groups."""
    return Lion(inputs.groups, learning_rate=inputs.learning_rate, betas=inputs.betas)
