"""How many positions a model is made for, and up to which length its rotary embedding does not depend on a batch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

ROPE = "rope_parameters"
BY_LENGTH = ("dynamic", "longrope")
"""Kinds of scaling whose frequencies depend on the longest sample of a forward pass."""


@dataclass(frozen=True)
class Positions:
    """The positions of a model as its config tells."""

    number: int  # that it is made for
    trained: int  # of pre-training, from which a scaling counts
    is_rotary: bool  # computed, so that there are more; else they may be a table
    by_length: str | None = None  # the kind of scaling whose frequencies depend on the longest sample of a batch
    same_up_to: int = 0  # the length up to which those do not change


def positions_of(config: PreTrainedConfig) -> Positions | None:
    """Return the positions of the model that reads text; None where its config tells of none."""
    text = config.get_text_config()
    number = getattr(text, "max_position_embeddings", None)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1 or getattr(text, "alibi", False) is True:
        return None
    scaled = list(_scalings(text))
    trained = number
    for each in scaled:
        origin = each.get("original_max_position_embeddings")
        trained = min(trained, origin) if isinstance(origin, int) else trained
        if each.get("rope_type") in BY_LENGTH:
            short = origin if isinstance(origin, int) and each["rope_type"] == "longrope" else number
            return Positions(number, trained, True, str(each["rope_type"]), short)
        if isinstance(origin, int) and isinstance(each.get("factor"), int | float):
            number = max(number, int(origin * each["factor"]))
    return Positions(number, trained, bool(scaled))


def _scalings(text: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the values of each rotary embedding of the text model."""
    parameters: dict[str, Any] = getattr(text, ROPE, None) or {}
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    yield from nested or ([parameters] if parameters else [])


def table_size(model: PreTrainedModel) -> int | None:
    """Return the length of the longest text for which the model has learned positions; None: it learned none."""
    sizes = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        is_position = ("position" in last and "relative" not in last) or last == "wpe"
        if isinstance(module, nn.Embedding) and is_position and not ("vision" in name or "visual" in name):
            first = getattr(module, "offset", 0) or (0 if module.padding_idx is None else module.padding_idx + 1)
            sizes.append(module.num_embeddings - first)
    return min(sizes, default=None)
