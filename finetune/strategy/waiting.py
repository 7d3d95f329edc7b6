"""Parameter groups that have not begun to learn have no part in the gradient norm that DeepSpeed's ZeRO works out.

Elsewhere their gradients are simply forgotten before the norm is taken. ZeRO takes the norm, clips and steps in one,
from buffers of its own; these are set to zero first. Seen with DeepSpeed 0.19.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from finetune.errors import StrategyError

WAITS = "waits"
"""The key of a group that has not begun to learn."""


def leave_waiting_out_of_norm(model: Any) -> None:
    """Have the prepared model's gradient norm be of the groups that learn; does nothing unless ZeRO takes it.

    Raises StrategyError for a kind of ZeRO whose gradients lie somewhere else.
    """
    zero = getattr(model, "optimizer", None) if hasattr(model, "zero_optimization_stage") else None
    if zero is None:
        return
    if not hasattr(zero, "averaged_gradients"):
        raise StrategyError(f"train.unfreeze: not under DeepSpeed's {type(zero).__name__}. Launch ZeRO-2 or fsdp2.")
    step = zero.step

    def step_of_learning(*values: Any, **settings: Any) -> Any:
        for gradient in _waiting(zero):
            gradient.zero_()
        return step(*values, **settings)

    zero.step = step_of_learning


def _waiting(zero: Any) -> Iterator[Tensor]:
    group_of = getattr(zero, "sub_group_to_group_id", None)  # ZeRO-3 cuts groups into smaller ones
    for number, gradients in zero.averaged_gradients.items():
        group = zero.optimizer.param_groups[number if group_of is None else group_of[number]]
        if group.get(WAITS):
            yield from gradients or ()
