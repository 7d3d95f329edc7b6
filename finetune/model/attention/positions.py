"""Rotary positions, which need more than the 10 bits of mantissa that TF32 has."""

from typing import Any

import torch
from torch import nn


def keep_positions_exact(model: nn.Module) -> None:
    """Compute the angles of rotary positions without TF32, which holds few positions above 2,048 exactly.

    transformers computes them as a matrix product of frequencies and positions, in float32 for that reason.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            switch = _ExactProducts()
            module.register_forward_pre_hook(switch.enter)
            module.register_forward_hook(switch.leave, always_call=True)


class _ExactProducts:
    """Switches TF32 off for a module's forward."""

    _before = "highest"

    def enter(self, *_: Any) -> None:
        self._before = torch.get_float32_matmul_precision()
        if self._before != "highest":
            torch.set_float32_matmul_precision("highest")

    def leave(self, *_: Any) -> None:
        if self._before != "highest":
            torch.set_float32_matmul_precision(self._before)
