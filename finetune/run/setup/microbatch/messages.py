"""What a user reads of the longest batch: that it fits, or that it does not and what to set."""

from collections.abc import Iterator, Mapping, Sequence

from finetune.config.rules.model import adapter_of
from finetune.config.run_config import RunConfig
from finetune.run.setup.microbatch.limits import MemoryLimit
from finetune.run.setup.microbatch.longest import LongestBatch
from finetune.runtime.resources import format_size

_MAX_NAMED_ROWS = 4
_LESS_SHARDED = ("single", "ddp", "zero1", "zero2")


def tried_line(longest: LongestBatch, peaks: Mapping[str, int], memories: Sequence[MemoryLimit]) -> str:
    """Return the line on a batch that fits; `peaks` are of the rank that took the most."""
    if not memories:
        return f"longest batch: {longest.format()} (step {longest.step}) fits: tried before the first step"
    taken = ", ".join(
        f"{format_size(peaks[memory.name])} of {format_size(memory.limit)} {memory.name}" for memory in memories
    )
    part = "" if longest.is_of_all else "; later steps may have longer ones"
    return f"longest batch: {longest.format()} (step {longest.step}) takes {taken}: tried before the first step{part}"


def out_of_memory_message(
    config: RunConfig,
    *,
    strategy: str,
    longest: LongestBatch,
    places: Sequence[str],
    smaller: Sequence[int],
    free: Mapping[str, tuple[int, int]],
) -> str:
    """Return which batch does not fit and what to set; `places` are its rows.

    `free` is what was free of each kind of memory on this rank before, and the limit.
    """
    named = "; ".join([*places[:_MAX_NAMED_ROWS], *([f"and {len(places) - _MAX_NAMED_ROWS} more"] * (len(places) > 4))])
    had = ", ".join(f"{format_size(left)} of {format_size(limit)} {name}" for name, (left, limit) in free.items())
    return (
        f"out of memory: the longest batch of this run does not fit, so step {longest.step} would end it. It has "
        f"{longest.format()}. Rows: {named}. A forward and backward pass over it needs more than is free on this rank: "
        f"{had}. To make it fit:\n" + "\n".join(f"  {line}" for line in _advice(config, strategy, smaller))
    )


def _advice(config: RunConfig, strategy: str, smaller: Sequence[int]) -> Iterator[str]:
    if smaller:
        yield f"set train.microbatch_size: {smaller[-1]} (the loss stays the same), or auto"
    if not config.model.gradient_checkpointing:
        yield "set model.gradient_checkpointing: true (a third more time, the same loss)"
    if config.data.max_length is not None:
        yield f"lower data.max_length ({config.data.max_length:,} now)"
    if config.data.batching.by != "samples":
        yield "lower data.batching.tokens"
    if strategy in _LESS_SHARDED:
        yield "launch with a strategy that shards more: accelerate_configs/fsdp2.yaml or zero3.yaml"
    if adapter_of(config) is None:
        yield "train adapters: model.lora"
    if config.model.quantization is None:
        yield "quantize the frozen base (QLoRA): model.quantization with model.lora"
