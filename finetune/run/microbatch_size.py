"""Before the first step: the longest batch is tried, and `train.microbatch_size: auto` becomes a number."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from pydantic import BaseModel, ConfigDict

from finetune.config.rules.model import adapter_of
from finetune.config.run_config import RunConfig, possible_microbatch_sizes
from finetune.config.section import KeyLocation
from finetune.data.loader import slice_batch
from finetune.errors import UserError
from finetune.memory.limits import (
    LongestBatch,
    MemoryLimit,
    MemoryLimits,
    Peaks,
    find_longest_batch,
    memories,
    release_freed_memory,
)
from finetune.memory.trial import Trial, later_host_bytes, missing_state_bytes, zero_buffer_bytes
from finetune.run.context import RunContext
from finetune.run.setup.build import BuiltRun, RestoredRun
from finetune.run.setup.model_problems import resolve_padding_free
from finetune.runtime import distributed
from finetune.runtime.files import atomic
from finetune.runtime.files.read import read_regular
from finetune.runtime.parallel import sequence_group, tensor_group
from finetune.runtime.resources import format_size
from finetune.runtime.supervision.heartbeat import keep_alive
from finetune.runtime.upstream import keep_freed_memory
from finetune.strategy.protocol import Sharded
from finetune.train.plan import StepPlan

KEY = "train.microbatch_size"
MICROBATCH_FILE = "microbatch.json"
_MAX_NAMED_ROWS = 4
_LESS_SHARDED = ("single", "ddp", "zero1", "zero2")


class MicrobatchRecord(BaseModel):
    """The size that `auto` resolved to, and where; kept in the run folder."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: int = 1
    microbatch_size: int
    strategy: str
    processes: int
    peaks: dict[str, int]  # by kind of memory, of the rank that used the most

    def still_holds(
        self, strategy: str, limits: MemoryLimits, *, memories: Sequence[str], sizes: Sequence[int]
    ) -> bool:
        """Return whether the run is launched as it was when the size was found, and as much memory is free."""
        world = distributed.world()
        peaks = tuple(self.peaks.get(name, 0) for name in memories) * world
        is_same = (self.strategy, self.processes) == (strategy, world)
        return is_same and self.microbatch_size in sizes and limits.holds(peaks)


@dataclass(frozen=True)
class _Tried:
    """The result of one size on all ranks."""

    longest: LongestBatch
    peaks: Peaks | None


@dataclass(frozen=True)
class _Tries:
    """Tries sizes on all ranks at once and keeps their peaks."""

    context: RunContext
    built: BuiltRun
    steps: range
    trial: Trial
    memories: tuple[MemoryLimit, ...]  # of this rank
    free: Mapping[str, tuple[int, int]]  # before any try, and the limit, by the name of the memory
    limits: MemoryLimits  # of all ranks
    tried: dict[int, _Tried] = field(default_factory=dict)

    def run(self, size: int) -> _Tried:
        """Try the longest batch of this size. Collective."""
        longest = find_longest_batch(
            self.context.config,
            self.built.training_data.training,
            self.built.training_data.task,
            batching=resolve_padding_free(self.context.config).batching,
            microbatch_size=size,
            steps=self.steps,
        )
        num_batches = self.built.plan.num_batches_of(size)
        keep_alive()
        own = self.trial.peaks(
            slice_batch(longest.batch, sequence_group()), num_batches=num_batches, memories=self.memories
        )
        if own is None and self.trial.is_sharded:
            self.refuse(size, longest)  # the others wait in a collective and end with this rank
        gathered = distributed.gather_objects(own)
        peaks = tuple(peak for of_rank in gathered for peak in of_rank or ())
        self.tried[size] = _Tried(longest, peaks if all(own is not None for own in gathered) else None)
        return self.tried[size]

    def refuse(self, size: int, longest: LongestBatch) -> NoReturn:
        """Raise UserError: the batch does not fit."""
        view, config = self.built.training_data.training, self.context.config
        rows = [view.samples.location(sample) for sample in longest.batch.sample_ids]
        more = [f"and {len(rows) - _MAX_NAMED_ROWS} more"] if len(rows) > _MAX_NAMED_ROWS else []
        named = "; ".join([*rows[:_MAX_NAMED_ROWS], *more])
        had = ", ".join(
            f"{format_size(left)} of {format_size(limit)} {name}" for name, (left, limit) in self.free.items()
        )
        smaller = [other for other in _sizes(config) if other < size]
        raise UserError(
            f"out of memory: the longest batch of this run does not fit, so step {longest.step} would end it. It has "
            f"{longest.format()}. Rows: {named}. A forward and backward pass over it needs more than is free on this "
            f"rank: {had}. To make it fit:\n"
            + "\n".join(f"  {line}" for line in _advice(config, self.context.strategy.name, smaller))
        )

    def by_name(self, peaks: Peaks) -> dict[str, int]:
        """Return for each kind of memory the peak of the rank that took the most."""
        names = [memory.name for memory in self.memories]
        return {name: max(peaks[number :: len(names)]) for number, name in enumerate(names)}


def resolve_microbatch_size(restored: RestoredRun) -> RestoredRun:
    """Return the run with the number that `auto` resolves to, after the longest batch to come was tried. Collective.

    Raises UserError if it does not fit into memory. The run has its weights, a checkpoint's included.
    """
    context, built, first_step = restored.context, restored.built, restored.progress.step
    if first_step >= built.plan.num_steps:
        return _with_size(restored, _sizes(context.config)[0])
    tries = _start_tries(context, built, first_step=first_step)
    if context.config.train.microbatch_size == "auto":
        return _with_size(restored, _choose(context, built, tries, is_resumed=first_step > 0))
    if (reason := _why_not_tried(context.config.train.try_longest_batch, built, tries)) is None:
        size = built.plan.microbatch_size
        tried = tries.run(size)
        if tried.peaks is None:
            tries.refuse(size, tried.longest)
        context.log(_tried_line(tried.longest, tries.by_name(tried.peaks), tries.memories))
    elif reason:
        context.log(reason)
    return restored


def _start_tries(context: RunContext, built: BuiltRun, *, first_step: int) -> _Tries:
    """Measure what is free on all ranks, after freed memory was released. Collective."""
    strategy, prepared = context.strategy, built.prepared
    is_sharded = Sharded.PARAMETERS in strategy.sharded
    trial = Trial(
        accelerator=prepared.accelerator,
        model=prepared.model,
        unwrapped_model=prepared.unwrapped_model,
        optimizer=prepared.optimizer,
        before_batch=prepared.before_batch,
        reduces_every_microbatch=prepared.reduces_every_microbatch,
        task=built.step_task,
        is_sharded=is_sharded,
        frees_gradients=context.config.train.optimizer.in_backward or strategy.expected.zero_stage == 2,
        extra_bytes=missing_state_bytes(prepared.optimizer, context.config.train)
        + (0 if is_sharded else zero_buffer_bytes(prepared.model)),
    )
    device = prepared.accelerator.device
    if device.type == "cpu":
        release_freed_memory()
        keep_freed_memory()  # as in the steps: what malloc keeps counts
    own = memories(device)
    free = {memory.name: (max(0, memory.limit - memory.used()), memory.limit) for memory in own}
    # In addition to the used memory, every size takes `fixed` on this rank, and the run needs `later`.
    fixed = trial.extra_bytes + trial.gradient_bytes
    later = later_host_bytes(prepared.optimizer, context.config, strategy=strategy) if device.type == "cpu" else 0
    gathered = distributed.gather_objects([(memory.used() + fixed, memory.limit - later) for memory in own])
    pairs = [pair for of_rank in gathered for pair in of_rank]
    limits = MemoryLimits(tuple(used for used, _ in pairs), tuple(limit for _, limit in pairs))
    return _Tries(context, built, range(first_step, built.plan.num_steps), trial, own, free, limits)


def _why_not_tried(requested: str, built: BuiltRun, tries: _Tries) -> str | None:
    """Return why the batch is not tried, empty where the user has written that; None to try it. Collective."""
    if requested != "auto":
        return "" if requested == "never" else None
    if built.prepared.accelerator.device.type != "cpu" or built.prepared.memory is None:
        return None
    ample = built.prepared.memory(built.plan).ample_cpu_bytes
    free = min(memory.limit - memory.used() for memory in tries.memories)
    by_rank = distributed.gather_objects((ample, free))
    ample, free = max(ample for ample, _ in by_rank), min(free for _, free in by_rank)
    if ample > free:
        return None
    return f"longest batch: not tried, since {format_size(free)} of memory are free (train.try_longest_batch)"


def _choose(context: RunContext, built: BuiltRun, tries: _Tries, *, is_resumed: bool) -> int:
    """Return the size that `auto` resolves to, and record it. Collective."""
    if not tries.memories:
        device = built.prepared.accelerator.device.type
        raise UserError(f"{KEY}: auto needs to measure memory, which is not supported on `{device}`. Write a number.")
    sizes: Sequence[int] = _sizes(context.config)
    record = distributed.run_on_rank_0(lambda: read_microbatch_record(context.folder)) if is_resumed else None
    if record is not None:
        recorded, names = record.microbatch_size, [memory.name for memory in tries.memories]
        if record.still_holds(context.strategy.name, tries.limits, memories=names, sizes=sizes):
            context.log(f"{KEY}: auto: {recorded}, as at the start of this run")
            if (tried := tries.run(recorded)).peaks is None:
                tries.refuse(recorded, tried.longest)
            return recorded
        is_possible = recorded in sizes
        sizes = [other for other in sizes if other <= recorded] if is_possible else sizes
        context.log(
            f"{KEY}: auto: {recorded} was found on {record.processes} processes under {record.strategy}; "
            f"{'sizes up to it are' if is_possible else 'it cannot be used now, so all others are'} tried"
        )
    measured: dict[int, Peaks | None] = {}  # of all ranks
    while (size := tries.limits.next_size(sizes, measured)) is not None:
        measured[size] = tries.run(size).peaks
    best = tries.limits.largest_fitting(measured)
    if best is None:
        tries.refuse(sizes[0], tries.tried[sizes[0]].longest)
    peaks, longest = tries.tried[best].peaks, tries.tried[best].longest
    assert peaks is not None, "the chosen size was measured"
    most = "" if best < sizes[-1] else ", the most that the global batch allows"
    context.log(f"{KEY}: auto: {best}{most} (tried {', '.join(map(str, measured))} of {', '.join(map(str, sizes))})")
    context.log(_tried_line(longest, tries.by_name(peaks), tries.memories))
    found = MicrobatchRecord(
        microbatch_size=best,
        strategy=context.strategy.name,
        processes=distributed.world(),
        peaks=tries.by_name(peaks),
    )
    path = context.folder / MICROBATCH_FILE
    distributed.run_on_rank_0(lambda: atomic.write_json(path, found.model_dump()))
    return best


def _sizes(config: RunConfig) -> tuple[int, ...]:
    num_processes = distributed.world() // (sequence_group().size * tensor_group().size)
    return possible_microbatch_sizes(config, num_processes=num_processes)


def _with_size(restored: RestoredRun, size: int) -> RestoredRun:
    """Return the run with the size in place of `auto`, at the line where that was written; any other is left alone."""
    context, built = restored.context, restored.built
    if context.config.train.microbatch_size != "auto":
        return restored
    plan: StepPlan = built.plan.with_microbatch_size(size)
    if built.prepared.memory is not None:
        context.log(built.prepared.memory(plan).line)
    loaded = context.loaded
    written = loaded.sources.get(KEY)
    line = written.line if written is not None else None
    where = f"auto: the most that fit; {written.where if written and line is not None else '--set'}"
    train = loaded.config.train.model_copy(update={"microbatch_size": size})
    config = loaded.config.model_copy(update={"train": train})
    loaded = replace(loaded, config=config, sources={**loaded.sources, KEY: KeyLocation(where, line)})
    return replace(restored, context=replace(context, loaded=loaded), built=replace(built, plan=plan))


def _tried_line(longest: LongestBatch, peaks: Mapping[str, int], memories: Sequence[MemoryLimit]) -> str:
    """Return the line on a batch that fits; `peaks` are of the rank that took the most."""
    if not memories:
        return f"longest batch: {longest.format()} (step {longest.step}) fits: tried before the first step"
    taken = ", ".join(
        f"{format_size(peaks[memory.name])} of {format_size(memory.limit)} {memory.name}" for memory in memories
    )
    part = "" if longest.is_of_all else "; later steps may have longer ones"
    return f"longest batch: {longest.format()} (step {longest.step}) takes {taken}: tried before the first step{part}"


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


def read_microbatch_record(folder: Path) -> MicrobatchRecord | None:
    """Return the record in the run folder; None without one that can be read."""
    try:
        return MicrobatchRecord.model_validate_json(read_regular(folder / MICROBATCH_FILE))
    except (OSError, ValueError):  # a ValidationError is one
        return None
