"""Rotary position embeddings of a model: how many positions it has, whether a scaling is used, and exact angles.

transformers keeps base, type and factor of the scaling in `rope_parameters`, in one mapping or in one per layer type;
`rope_scaling` and `rope_theta` are older names for parts of it. Rotary positions need more than the 10 bits of mantissa
that TF32 has.
"""

import inspect
from collections.abc import Mapping
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


def rope_names(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the values that change rotary embeddings, including those in a text config."""
    inner = [name for value in values.values() if isinstance(value, Mapping) for name in rope_names(value)]
    return [name for name in values if name in ("rope_scaling", ROPE, "rope_theta")] or inner


def is_remote_code(model: PreTrainedModel) -> bool:
    """Return whether the model's code came with its weights."""
    return not type(model).__module__.startswith("transformers.")


def uses_scaling(model: PreTrainedModel, unscaled: PreTrainedModel) -> bool:
    """Return whether the rotary embeddings of the models differ; both may be on the meta device."""
    if getattr(model.config, "alibi", False) is True:  # biases attention scores instead of rotating
        return False
    scaled = _frequencies(model)
    if scaled != _frequencies(unscaled):
        return True
    for values in scaled.values():
        rope_types = values.get("rope_type")
        used = rope_types.values() if isinstance(rope_types, dict) else [rope_types]
        if any(rope_type in BY_LENGTH for rope_type in used):
            return True
    return False


def _frequencies(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """Return frequencies, scale and type of each rotary embedding."""
    frequencies: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        buffers = [buffer for buffer, _ in module.named_buffers(recurse=False) if "inv_freq" in buffer]
        config = getattr(module, "config", None)
        if not buffers or not isinstance(config, PreTrainedConfig):
            continue
        if "config" not in inspect.signature(type(module).__init__).parameters:
            continue
        with torch.device("cpu"):
            real = type(module)(config=config)
        values = {buffer: getattr(real, buffer).tolist() for buffer in buffers}
        values |= {key: value for key, value in vars(real).items() if key.endswith("attention_scaling")}
        frequencies[name] = {**values, "rope_type": getattr(real, "rope_type", None)}
    return frequencies
