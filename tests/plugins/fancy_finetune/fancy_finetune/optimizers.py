"""An optimizer: the sign of a momentum, elementwise, so that any shard can be updated alone."""

import torch

from finetune import register


class SignMomentum(torch.optim.Optimizer):
    """Moves each weight by the learning rate against the sign of its momentum."""

    def __init__(self, groups: list, *, learning_rate: float, decay: float) -> None:
        super().__init__(groups, {"lr": learning_rate, "decay": decay, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1.0 - group["decay"])
                weight.mul_(1.0 - group["lr"] * group["weight_decay"])
                weight.add_(momentum.sign(), alpha=-group["lr"])


class SignMomentumOptions(register.Section):
    """What the optimizer reads of `plugin_options.sign_momentum`."""

    decay: float = register.key("Of the momentum.", 0.9, ge=0.0, lt=1.0)


@register.optimizer(
    "sign_momentum",
    states=[register.OptimizerState(class_name="SignMomentum", keys=("momentum",))],
    num_moments=1,
    options=SignMomentumOptions,
)
def sign_momentum(inputs: object, *, options: SignMomentumOptions) -> SignMomentum:
    """Return the optimizer over the groups."""
    return SignMomentum(inputs.groups, learning_rate=inputs.learning_rate, decay=options.decay)
