"""Before the first step: the longest batch is tried, and `train.microbatch_size: auto` becomes a number."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from finetune.config.load import LoadedConfig
from finetune.config.run_config import possible_microbatch_sizes
from finetune.config.section import KeyLocation
from finetune.data.sequence_slices import slice_batch
from finetune.errors import UserError
from finetune.run.context import RunContext
from finetune.run.setup.microbatch.choose import MemoryLimits, Peaks, largest_fitting, next_size
from finetune.run.setup.microbatch.limits import MemoryLimit, memories, release_freed_memory
from finetune.run.setup.microbatch.longest import LongestBatch, find_longest_batch
from finetune.run.setup.microbatch.messages import out_of_memory_message, tried_line
from finetune.run.setup.microbatch.not_yet_allocated import later_host_bytes, missing_state_bytes, zero_buffer_bytes
from finetune.run.setup.microbatch.record import MicrobatchRecord, memory_settings, read_record, write_record
from finetune.run.setup.microbatch.trial import Trial
from finetune.run.setup.prepared_model import BuiltRun
from finetune.runtime import distributed
from finetune.runtime.resources import format_size
from finetune.runtime.sequence_parallel import sequence_group
from finetune.runtime.supervision.heartbeat import keep_alive
from finetune.runtime.upstream import keep_freed_memory
from finetune.strategy.protocol import Sharded
from finetune.train.plan import StepPlan

KEY = "train.microbatch_size"

CPU_FACTOR = 4
"""On a CPU the longest batch is not tried where so many times the memory that a run is estimated to need is free."""


@dataclass(frozen=True)
class _Tried:
    """What one size has come to on all ranks."""

    longest: LongestBatch
    peaks: Peaks | None


class _Tries:
    """Tries sizes on all ranks at once and keeps what each has taken."""

    def __init__(self, context: RunContext, built: BuiltRun, *, first_step: int) -> None:
        self._context, self._built = context, built
        self._steps = range(first_step, built.plan.num_steps)
        self._trial = _make_trial(context, built)
        device = built.prepared.accelerator.device
        if device.type == "cpu":
            release_freed_memory()
            keep_freed_memory()  # as in the steps: what malloc keeps counts
        self.memories = memories(device)
        self._free = {each.name: (max(0, each.limit - each.used()), each.limit) for each in self.memories}
        fixed = self._trial.extra_bytes + self._trial.gradient_bytes
        later = later_host_bytes(built.prepared.optimizer, context.config, strategy=context.strategy)
        self.limits = _memory_limits(self.memories, fixed=fixed, later=later if device.type == "cpu" else 0)
        self.tried: dict[int, _Tried] = {}

    @property
    def measured(self) -> dict[int, Peaks | None]:
        """Return the peaks of all ranks by size."""
        return {size: each.peaks for size, each in self.tried.items()}

    def run(self, size: int) -> _Tried:
        """Try the longest batch of this size. Collective.

        Raises UserError where it does not fit and parameters are sharded.
        """
        longest = find_longest_batch(
            self._context.config, self._built.training_data, microbatch_size=size, steps=self._steps
        )
        num_batches = self._built.plan.num_batches_of(size)
        keep_alive()
        own = self._trial.peaks(
            slice_batch(longest.batch, sequence_group()), num_batches=num_batches, memories=self.memories
        )
        if own is None and self._trial.is_sharded:
            self.refuse(size, longest)  # the others wait in a collective and end with this rank
        gathered = distributed.gather_objects(own)
        peaks = tuple(peak for of_rank in gathered for peak in of_rank or ())
        self.tried[size] = _Tried(longest, peaks if all(each is not None for each in gathered) else None)
        return self.tried[size]

    def refuse(self, size: int, longest: LongestBatch) -> NoReturn:
        """Raise UserError: the batch does not fit."""
        view = self._built.training_data.training
        raise UserError(
            out_of_memory_message(
                self._context.config,
                strategy=self._context.strategy.name,
                longest=longest,
                places=[view.samples.place(each) for each in longest.batch.sample_ids],
                smaller=[each for each in _sizes(self._context) if each < size],
                free=self._free,
            )
        )

    def by_name(self, peaks: Peaks) -> dict[str, int]:
        """Return for each kind of memory the peak of the rank that took the most."""
        names = [memory.name for memory in self.memories]
        return {name: max(peaks[number :: len(names)]) for number, name in enumerate(names)}


def resolve_microbatch_size(context: RunContext, built: BuiltRun, *, first_step: int) -> tuple[RunContext, BuiltRun]:
    """Return both with the number that `auto` comes to; the longest batch of the steps to come is tried. Collective.

    Raises UserError where it does not fit into memory. The run has its weights, those of a checkpoint included.
    """
    if first_step >= built.plan.num_steps:
        return _with_size(context, built, size=_sizes(context)[0])
    tries = _Tries(context, built, first_step=first_step)
    if context.config.train.microbatch_size == "auto":
        return _with_size(context, built, size=_choose(context, built, tries, is_resumed=first_step > 0))
    _try_written(context, built, tries)
    return context, built


def _try_written(context: RunContext, built: BuiltRun, tries: _Tries) -> None:
    if (reason := _why_not_tried(context, built, tries)) is not None:
        if reason:
            context.log(reason)
        return
    size = built.plan.microbatch_size
    tried = tries.run(size)
    if tried.peaks is None:
        tries.refuse(size, tried.longest)
    context.log(tried_line(tried.longest, tries.by_name(tried.peaks), tries.memories))


def _why_not_tried(context: RunContext, built: BuiltRun, tries: _Tries) -> str | None:
    """Return why the batch is not tried, empty where the user has written that; None to try it. Collective."""
    wanted = context.config.train.try_longest_batch
    if wanted != "auto":
        return "" if wanted == "never" else None
    if built.prepared.accelerator.device.type != "cpu" or built.prepared.memory is None:
        return None
    needed = max(0, built.prepared.memory.of(built.plan).peak_bytes - tries.memories[0].used())
    free = min(memory.limit - memory.used() for memory in tries.memories)
    needed, free = (
        max(each) if number == 0 else min(each)
        for number, each in enumerate(zip(*distributed.gather_objects((needed, free)), strict=True))
    )
    if CPU_FACTOR * needed > free:
        return None
    return (
        f"longest batch: not tried, since about {format_size(needed)} are needed of {format_size(free)} that are free "
        "(train.try_longest_batch)"
    )


def _choose(context: RunContext, built: BuiltRun, tries: _Tries, *, is_resumed: bool) -> int:
    """Return the size that `auto` comes to, and remember it. Collective."""
    if not tries.memories:
        kind = built.prepared.accelerator.device.type
        raise UserError(f"{KEY}: auto needs to measure memory, which this version cannot on `{kind}`. Write a number.")
    sizes: Sequence[int] = _sizes(context)
    record = distributed.run_on_rank_0(lambda: read_record(context.paths.folder)) if is_resumed else None
    if record is not None and _still_holds(record, context, tries, sizes=sizes):
        context.log(f"{KEY}: auto: {record.microbatch_size}, as at the start of this run")
        if tries.memories[0].name == "GPU memory":
            tried = tries.run(record.microbatch_size)
            if tried.peaks is None:
                tries.refuse(record.microbatch_size, tried.longest)
        return record.microbatch_size
    if record is not None:
        sizes = _sizes_after(record, context, sizes)
    while (size := next_size(sizes, tries.measured, tries.limits)) is not None:
        tries.run(size)
    best = largest_fitting(tries.measured, tries.limits)
    if best is None:
        tries.refuse(sizes[0], tries.tried[sizes[0]].longest)
    _log_choice(context, tries, best, sizes=sizes)
    _remember(context, tries, best)
    return best


def _still_holds(record: MicrobatchRecord, context: RunContext, tries: _Tries, *, sizes: Sequence[int]) -> bool:
    """Tell whether the run is as it was when the size was found, and has the memory that it took then."""
    is_same = (record.strategy, record.processes, record.sequence_size, record.settings) == (
        context.strategy.name,
        distributed.world(),
        sequence_group().size,
        dict(memory_settings(context.config)),
    )
    names = [memory.name for memory in tries.memories]
    recorded = tuple(record.peaks.get(name, 0) for name in names) * distributed.world()
    return is_same and record.microbatch_size in sizes and tries.limits.holds(recorded)


def _sizes_after(record: MicrobatchRecord, context: RunContext, sizes: Sequence[int]) -> Sequence[int]:
    """Return the sizes to look at where the remembered one is not just taken: up to it, if it is one of them."""
    size, world = record.microbatch_size, distributed.world()
    if size not in sizes:
        context.log(
            f"{KEY}: auto: {size} was found on {record.processes} processes under {record.strategy} and cannot be used "
            f"on {world}: {context.config.train.global_batch_size} / {world} is not a multiple of it. It is found anew"
        )
        return sizes
    context.log(
        f"{KEY}: auto: {size} was found under {record.strategy} on {record.processes} processes with other settings or "
        f"more free memory than now; it is tried again, and a smaller one is taken where it does not fit"
    )
    return [each for each in sizes if each <= size]


def _log_choice(context: RunContext, tries: _Tries, size: int, *, sizes: Sequence[int]) -> None:
    tried, longest = tries.tried[size].peaks, tries.tried[size].longest
    assert tried is not None, "the chosen size was measured"
    measured = ", ".join(str(each) for each in tries.tried)
    limits = "" if size < sizes[-1] else ", the most that the global batch allows"
    context.log(f"{KEY}: auto: {size}{limits} (tried {measured} of {', '.join(map(str, sizes))})")
    context.log(tried_line(longest, tries.by_name(tried), tries.memories))


def _remember(context: RunContext, tries: _Tries, size: int) -> None:
    peaks = tries.tried[size].peaks
    assert peaks is not None, "the chosen size was measured"
    record = MicrobatchRecord(
        microbatch_size=size,
        strategy=context.strategy.name,
        processes=distributed.world(),
        sequence_size=sequence_group().size,
        peaks=tries.by_name(peaks),
        settings=dict(memory_settings(context.config)),
    )
    distributed.run_on_rank_0(lambda: write_record(context.paths.folder, record))


def _sizes(context: RunContext) -> tuple[int, ...]:
    return possible_microbatch_sizes(context.config, num_processes=sequence_group().num_groups)


def _memory_limits(own: Sequence[MemoryLimit], *, fixed: int, later: int) -> MemoryLimits:
    """Return the memory of all ranks. Collective.

    Beside what is used, every size takes `fixed` on this rank, and the run needs `later` for other things.
    """
    gathered = distributed.gather_objects([(memory.used() + fixed, memory.limit - later) for memory in own])
    pairs = [pair for of_rank in gathered for pair in of_rank]
    return MemoryLimits(tuple(used for used, _ in pairs), tuple(limit for _, limit in pairs))


def _make_trial(context: RunContext, built: BuiltRun) -> Trial:
    strategy, prepared = context.strategy, built.prepared
    is_sharded = Sharded.PARAMETERS in strategy.sharded() or strategy.expected().fsdp_version is not None
    return Trial(
        prepared,
        built.step_task,
        is_sharded=is_sharded,
        frees_gradients=context.config.train.optimizer.in_backward or strategy.expected().zero_stage == 2,
        extra_bytes=missing_state_bytes(prepared.optimizer, context.config.train)
        + (0 if is_sharded else zero_buffer_bytes(prepared.model)),
    )


def _with_size(context: RunContext, built: BuiltRun, *, size: int) -> tuple[RunContext, BuiltRun]:
    """Return both with the size in place of `auto`; anything else is left alone."""
    if context.config.train.microbatch_size != "auto":
        return context, built
    plan: StepPlan = built.plan.with_microbatch_size(size)
    if built.prepared.memory is not None:
        context.log(built.prepared.memory.of(plan).summary)
    return replace(context, loaded=_with_number(context.loaded, size)), replace(built, plan=plan)


def _with_number(loaded: LoadedConfig, size: int) -> LoadedConfig:
    """Return the config with the number, and with its source: where `auto` was written."""
    written = loaded.sources.get(KEY)
    line = written.line if written is not None else None
    where = f"auto: the most that fit; {written.where if written and line is not None else '--set'}"
    train = loaded.config.train.model_copy(update={"microbatch_size": size})
    config = loaded.config.model_copy(update={"train": train})
    return replace(loaded, config=config, sources={**loaded.sources, KEY: KeyLocation(where, line)})
