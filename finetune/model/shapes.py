"""The shapes of a decoder's layers, by its config."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shapes:
    """Widths and counts of a text model."""

    hidden: int
    queries: int  # numbers of all query heads of a token
    keys: int  # numbers of all key heads of a token, and likewise of its value heads
    heads: int
    intermediate: int  # of the MLP, or of a token's experts together
    layers: int
    vocabulary: int


def read_shapes(config: Any) -> Shapes | None:
    """Return the shapes of the text model in a config; None where it has none."""
    text: Any = config.get_text_config(decoder=True)
    required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if not all(isinstance(getattr(text, name, None), int) for name in required):
        return None
    hidden, heads = text.hidden_size, text.num_attention_heads
    width = _widest(text, "head_dim") or hidden // heads
    experts = getattr(text, "num_experts_per_tok", None) or 1
    intermediate = _widest(text, "intermediate_size") or 4 * hidden
    if experts > 1:
        intermediate = experts * (getattr(text, "moe_intermediate_size", None) or intermediate)
    return Shapes(
        hidden=hidden,
        queries=heads * width,
        keys=(_widest(text, "num_key_value_heads") or heads) * width,
        heads=heads,
        intermediate=intermediate,
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
    )


def _widest(text: Any, name: str) -> int:
    """Return the largest value of any layer (the layers of Gemma 3n and Gemma 4 differ); 0 without one."""
    layers = getattr(text, "per_layer_config", None) or (text,)
    values = [getattr(layer, name, None) for layer in layers]
    sizes = [size for value in values for size in (value if isinstance(value, list | tuple) else [value])]
    return max((size for size in sizes if isinstance(size, int)), default=0)
