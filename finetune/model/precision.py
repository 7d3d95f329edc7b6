"""What is lost when weights are held in fewer bits than the updates need."""

from collections.abc import Sequence

SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11}


def precision_warnings(
    *,
    dtype: str,
    is_lora: bool,
    modules_to_save: Sequence[str] = (),
    rounds_by_chance: bool = False,
    state_dtype: str | None = None,
) -> tuple[str, ...]:
    """Return a sentence for each loss that the choice of `model.dtype` brings; none where nothing is lost.

    A weight of b significant bits is unchanged by an update below half a unit in its last place: 2^-b of the weight, or
    half of that just below a power of two. Most updates of AdamW are that small. Adapters are always float32. Rounded
    by chance, small updates count on average.
    """
    bits = SIGNIFICANT_BITS.get(dtype)
    if bits is None or rounds_by_chance or (is_lora and not modules_to_save):
        return ()
    learning = (
        f"the modules in `model.lora.modules_to_save` ({', '.join(modules_to_save)})" if is_lora else "all weights"
    )
    moments = "" if state_dtype else f", and the optimizer's moments are {dtype} too"
    chance = ", or `train.optimizer.stochastic_rounding: true` to round by chance" if dtype == "bfloat16" else ""
    return (
        f"model.dtype is {dtype}, so {learning} learn in {dtype} without a float32 master copy: an update smaller than "
        f"about 2^-{bits} (1/{2**bits}) of a weight is rounded away{moments}. "
        f"Write `model.dtype: float32` to keep master weights{chance}; `train.precision` sets the type of the "
        "arithmetic.",
    )
