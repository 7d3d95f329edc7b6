"""Positions of a model: their number, the length from which they depend on the batch, and their precision.

Rotary positions need more than the 10 bits of mantissa that TF32 has.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

ROPE = "rope_parameters"
BY_LENGTH = ("dynamic", "longrope")
"""Scaling types whose frequencies depend on the longest sample of a forward pass."""


@dataclass(frozen=True)
class Positions:
    """The positions of a model according to its config."""

    number: int  # the number of positions that the model supports
    trained: int  # the number in pre-training, before scaling
    is_rotary: bool  # computed, and thus unlimited; otherwise they may be a table
    by_length: str | None = None  # the scaling type if its frequencies depend on the longest sample of a batch
    same_up_to: int = 0  # the length up to which these frequencies do not change


def positions_of(config: PreTrainedConfig) -> Positions | None:
    """Return the positions of the text model; None if its config has none."""
    text = config.get_text_config()
    number = getattr(text, "max_position_embeddings", None)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1 or getattr(text, "alibi", False) is True:
        return None
    parameters: dict[str, Any] = getattr(text, ROPE, None) or {}
    nested = [inner for inner in parameters.values() if isinstance(inner, dict)]
    scalings = nested or ([parameters] if parameters else [])  # one for all layers, or one per layer type
    trained = number
    for scaling in scalings:
        origin = scaling.get("original_max_position_embeddings")
        trained = min(trained, origin) if isinstance(origin, int) else trained
        if scaling.get("rope_type") in BY_LENGTH:
            short = origin if isinstance(origin, int) and scaling["rope_type"] == "longrope" else number
            return Positions(number, trained, True, str(scaling["rope_type"]), short)
        if isinstance(origin, int) and isinstance(scaling.get("factor"), int | float):
            number = max(number, int(origin * scaling["factor"]))
    return Positions(number, trained, bool(scalings))


def table_size(model: PreTrainedModel) -> int | None:
    """Return the number of learned positions; None if positions are not learned."""
    sizes = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        is_position = ("position" in last and "relative" not in last) or last == "wpe"
        if isinstance(module, nn.Embedding) and is_position and not ("vision" in name or "visual" in name):
            first = getattr(module, "offset", 0) or (0 if module.padding_idx is None else module.padding_idx + 1)
            sizes.append(module.num_embeddings - first)
    return min(sizes, default=None)


def keep_positions_exact(model: nn.Module) -> None:
    """Compute the angles of rotary positions without TF32, which represents few positions above 2,048 exactly.

    transformers computes them as a float32 matrix product of frequencies and positions, to which TF32 would apply.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            switch = _ExactProducts()
            module.register_forward_pre_hook(switch.enter)
            module.register_forward_hook(switch.leave, always_call=True)


class _ExactProducts:
    """Disables TF32 during a module's forward."""

    _previous = "highest"

    def enter(self, *_: Any) -> None:
        self._previous = torch.get_float32_matmul_precision()
        if self._previous != "highest":
            torch.set_float32_matmul_precision("highest")

    def leave(self, *_: Any) -> None:
        if self._previous != "highest":
            torch.set_float32_matmul_precision(self._previous)
