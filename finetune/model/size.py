"""The size of a model: parameters, bytes of optimizer state, precision of its dtype, and the shapes of its layers."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from finetune.registry.optimizers import INT8_BYTES, OPTIMIZERS
from finetune.runtime.parameters import full_numel, num_values
from finetune.runtime.resources import format_size

SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11}


def precision_warnings(
    *,
    dtype: str,
    is_lora: bool,
    modules_to_save: Sequence[str] = (),
    uses_stochastic_rounding: bool = False,
    state_dtype: str | None = None,
) -> tuple[str, ...]:
    """Return a warning for each loss of precision due to `model.dtype`.

    A weight with b significant bits is unchanged by an update below half a unit in its last place: 2^-b of the weight,
    or half of that just below a power of two. Most updates of AdamW are that small. Adapters are always float32. With
    stochastic rounding, small updates take effect on average.
    """
    bits = SIGNIFICANT_BITS.get(dtype)
    if bits is None or uses_stochastic_rounding or (is_lora and not modules_to_save):
        return ()
    trained = (
        f"the modules in `model.lora.modules_to_save` ({', '.join(modules_to_save)})" if is_lora else "all weights"
    )
    moments = "" if state_dtype else f", and the optimizer's moments are {dtype} too"
    option = ", or `train.optimizer.stochastic_rounding: true` for stochastic rounding" if dtype == "bfloat16" else ""
    return (
        f"model.dtype is {dtype}, so {trained} are trained in {dtype} without float32 master weights: an update "
        f"smaller than about 2^-{bits} (1/{2**bits}) of a weight is rounded away{moments}. "
        f"Write `model.dtype: float32` to keep master weights{option}; `train.precision` sets the dtype of the "
        "computation.",
    )


AVERAGE_BYTES = 4
"""Bytes of `train.average` per trained parameter."""

_BYTES_PER_STATE = {"float32": 4.0, "bfloat16": 2.0, "int8": INT8_BYTES}


def optimizer_state_bytes(optimizer: str, state_dtype: str | None, *, num_trained: int, trained_bytes: int) -> int:
    """Return the bytes of optimizer state: in `state_dtype`, or in the dtype of the trained parameters."""
    entry = OPTIMIZERS[optimizer]
    bytes_each = _BYTES_PER_STATE[state_dtype] if state_dtype else trained_bytes / max(1, num_trained)
    return round(entry.num_moments * (entry.moment_bytes or bytes_each) * num_trained)


_ADAPTED_MODULE = re.compile(r"(.+?)\.(?:lora_|ia3_l|oft_R)")


@dataclass(frozen=True)
class ModelSize:
    """Counts over the whole model, independent of this rank's shards; a tied parameter counts once."""

    num_parameters: int
    num_trained: int
    num_adapted_modules: int
    bytes_by_dtype: Mapping[str, int]
    trained_bytes_by_dtype: Mapping[str, int]
    largest_trained_bytes: int = 0  # of one parameter
    whole_share: float = 0.0  # share of the parameters that tensor parallelism leaves whole on every rank

    @property
    def lines(self) -> tuple[str, ...]:
        """Return the lines to print."""
        share = 100 * self.num_trained / max(self.num_parameters, 1)
        adapters = f", in adapters on {self.num_adapted_modules} modules" if self.num_adapted_modules else ""
        weights = ", ".join(f"{format_size(size)} in {dtype}" for dtype, size in self.bytes_by_dtype.items())
        return (
            f"trained: {self.num_trained:,} of {self.num_parameters:,} parameters ({share:.2f}%){adapters}",
            f"weights: {weights}",
        )


def measure_model(model: nn.Module) -> ModelSize:
    """Return the model's size; parameters that ZeRO-3 has partitioned count in full."""
    bytes_by_dtype: Counter[str] = Counter()
    trained_bytes: Counter[str] = Counter()
    num_parameters = num_trained = largest = num_whole = 0
    for parameter in model.parameters():
        count = full_numel(parameter)
        dtype = str(parameter.dtype).removeprefix("torch.")
        num_parameters += num_values(parameter)
        num_whole += 0 if isinstance(parameter, DTensor) else num_values(parameter)
        bytes_by_dtype[dtype] += count * parameter.element_size()
        if parameter.requires_grad:
            num_trained += count
            trained_bytes[dtype] += count * parameter.element_size()
            largest = max(largest, count * parameter.element_size())
    matches = [_ADAPTED_MODULE.match(name) for name, _ in model.named_parameters()]
    return ModelSize(
        num_parameters=num_parameters,
        num_trained=num_trained,
        num_adapted_modules=len({match[1] for match in matches if match}),  # without fully trained ones
        bytes_by_dtype=dict(bytes_by_dtype),
        trained_bytes_by_dtype=dict(trained_bytes),
        largest_trained_bytes=largest,
        whole_share=num_whole / num_parameters if num_whole < num_parameters else 0.0,
    )


@dataclass(frozen=True)
class Shapes:
    """Widths and counts of a text model."""

    hidden: int
    queries: int  # numbers of all query heads of a token
    keys: int  # numbers of all key heads of a token, and the same of its value heads
    heads: int
    intermediate: int  # of the MLP, or of a token's experts together
    layers: int
    vocabulary: int


def read_shapes(config: Any) -> Shapes | None:
    """Return the shapes of the text model in a config; None if it has none."""
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
