"""How large a model is: parameters, trained parameters, memory per rank, and what its dtype loses."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

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
    """Return a warning for each loss of precision by `model.dtype`; none where nothing is lost.

    A weight with b significant bits is unchanged by an update below half a unit in its last place: 2^-b of the weight,
    or half of that just below a power of two. Most updates of AdamW are that small. Adapters are always float32. With
    stochastic rounding, small updates count on average.
    """
    bits = SIGNIFICANT_BITS.get(dtype)
    if bits is None or uses_stochastic_rounding or (is_lora and not modules_to_save):
        return ()
    trained = (
        f"the modules in `model.lora.modules_to_save` ({', '.join(modules_to_save)})" if is_lora else "all weights"
    )
    moments = "" if state_dtype else f", and the optimizer's moments are {dtype} too"
    chance = ", or `train.optimizer.stochastic_rounding: true` for stochastic rounding" if dtype == "bfloat16" else ""
    return (
        f"model.dtype is {dtype}, so {trained} are trained in {dtype} without float32 master weights: an update "
        "smaller than "
        f"about 2^-{bits} (1/{2**bits}) of a weight is rounded away{moments}. "
        f"Write `model.dtype: float32` to keep master weights{chance}; `train.precision` sets the dtype of the "
        "computation.",
    )


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per rank."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    lines: tuple[str, ...]
    step_bytes: int = 0  # of activations and all else that a step takes
    planned_bytes: int | None = None  # the peak that `finetune plan` predicted for this run

    @property
    def summary(self) -> str:
        """Return the line with the sum, and what the plan predicted."""
        planned = "" if self.planned_bytes is None else f"; planned {format_size(self.planned_bytes)}"
        return self.lines[-1] + planned

    @property
    def total_bytes(self) -> int:
        """Return the sum of weights, gradients and optimizer state."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def peak_bytes(self) -> int:
        """Return the most that the rank is expected to take."""
        return self.total_bytes + self.step_bytes


AVERAGE_BYTES = 4
"""Bytes of `train.average` per trained parameter."""

_BYTES_PER_STATE = {"float32": 4.0, "bfloat16": 2.0, "int8": INT8_BYTES}


def optimizer_state_bytes(optimizer: str, state_dtype: str | None, *, num_trained: int, trained_bytes: int) -> int:
    """Return the bytes of optimizer state: in `state_dtype`, or in the dtype of the trained parameters."""
    entry = OPTIMIZERS[optimizer]
    bytes_each = _BYTES_PER_STATE[state_dtype] if state_dtype else trained_bytes / max(1, num_trained)
    return round(entry.num_moments * (entry.moment_bytes or bytes_each) * num_trained)


def estimate_memory(
    *,
    weights_bytes: int,
    gradients_bytes: int,
    optimizer_bytes: int,
    shards: int,
    shards_weights: bool,
    shards_gradients: bool,
    shards_optimizer: bool,
    has_teacher: bool = False,
    process_bytes: int = 0,
    unsharded_gradient_bytes: int = 0,
    step_parts: Mapping[str, int] | None = None,
) -> MemoryEstimate:
    """Return the memory of one of `shards` ranks, each part divided among them where the strategy shards it.

    `process_bytes` is what the process takes without a model: it counts where resident memory is measured, on a CPU.
    `unsharded_gradient_bytes` is what each rank keeps between the microbatches of a step besides its share of the
    gradient. `step_parts` are what else a step takes, by name; None, or without `activations`: they are not counted, as
    is a teacher, which reports its own size.
    """
    parts = (
        ("weights", weights_bytes, shards if shards_weights else 1),
        ("gradients", gradients_bytes, shards if shards_gradients else 1),
        ("optimizer state", optimizer_bytes, shards if shards_optimizer else 1),
    )
    per_rank = [-(-size // among) for _, size, among in parts]
    lines = [
        _memory_line(name, size=size, among=among, size_per_rank=part)
        for (name, size, among), part in zip(parts, per_rank, strict=True)
    ]
    sizes = [(name, part) for (name, _, _), part in zip(parts, per_rank, strict=True)]
    steps = {**(step_parts or {}), "process": process_bytes}
    others = {"unsharded gradient": unsharded_gradient_bytes, **steps}
    sizes += [(name, size) for name, size in others.items() if size]
    excluded = (["the teacher"] if has_teacher else []) + ([] if "activations" in steps else ["activations"])
    gradients_per_rank = per_rank[1] + unsharded_gradient_bytes
    lines.append(_total_line(dict(sizes), excluded=excluded))
    return MemoryEstimate(per_rank[0], gradients_per_rank, per_rank[2], tuple(lines), sum(steps.values()))


def _total_line(sizes: Mapping[str, int], *, excluded: Sequence[str]) -> str:
    summands = " + ".join(f"{name} {format_size(size)}" for name, size in sizes.items())
    without = f", without {' and '.join(excluded)}" if excluded else ""
    return f"memory: {format_size(sum(sizes.values()))} per rank = {summands}{without}"


def _memory_line(name: str, *, size: int, among: int, size_per_rank: int) -> str:
    if among == 1:
        return f"{name}: {format_size(size_per_rank)} on every rank"
    return f"{name}: {format_size(size_per_rank)} per rank = {format_size(size)} / {among} ranks"


_ADAPTED_MODULE = re.compile(r"(.+?)\.(?:lora_|ia3_l|oft_R)")


@dataclass(frozen=True)
class ModelSize:
    """Counts over the whole model, whichever part this rank holds; a tied parameter counts once."""

    num_parameters: int
    num_trained: int
    num_adapted_modules: int
    bytes_by_dtype: Mapping[str, int]
    trained_bytes_by_dtype: Mapping[str, int]
    largest_trained_bytes: int = 0  # of one parameter

    @property
    def lines(self) -> tuple[str, ...]:
        """Return the lines to print."""
        share = 100 * self.num_trained / max(self.num_parameters, 1)
        place = f", in adapters on {self.num_adapted_modules} modules" if self.num_adapted_modules else ""
        weights = ", ".join(f"{format_size(size)} in {dtype}" for dtype, size in self.bytes_by_dtype.items())
        return (
            f"trained: {self.num_trained:,} of {self.num_parameters:,} parameters ({share:.2f}%){place}",
            f"weights: {weights}",
        )


def measure_model(model: nn.Module) -> ModelSize:
    """Return the model's size; parameters that ZeRO-3 has partitioned count in full."""
    bytes_by_dtype: Counter[str] = Counter()
    trained_bytes: Counter[str] = Counter()
    num_parameters = num_trained = largest = 0
    for parameter in model.parameters():
        count = full_numel(parameter)
        dtype = str(parameter.dtype).removeprefix("torch.")
        num_parameters += num_values(parameter)
        bytes_by_dtype[dtype] += count * parameter.element_size()
        if parameter.requires_grad:
            num_trained += count
            trained_bytes[dtype] += count * parameter.element_size()
            largest = max(largest, count * parameter.element_size())
    return ModelSize(
        num_parameters, num_trained, _num_adapted(model), dict(bytes_by_dtype), dict(trained_bytes), largest
    )


def _num_adapted(model: nn.Module) -> int:
    """Count the modules of the base that have an adapter of any kind; fully trained modules do not count."""
    return len({match[1] for name, _ in model.named_parameters() if (match := _ADAPTED_MODULE.match(name))})
