"""The job on 1, 2, 4, 8, ... GPUs of the kind, each number with the strategy that is fastest there."""

from collections.abc import Sequence
from dataclasses import replace

from finetune.commands.plan.cost.scaling import ScalePoint
from finetune.commands.plan.hardware import Hardware
from finetune.commands.plan.job import PlannedJob
from finetune.commands.plan.memory import Fit, PlannedMemory, with_ranks
from finetune.commands.plan.strategies import StrategyPlan, choose, timed, with_microbatch
from finetune.memory.layout import StrategyName

MAX_GPUS = 256


def scale_points(
    job: PlannedJob,
    hardware: Hardware,
    plans: Sequence[StrategyPlan],
    memory: PlannedMemory,
    *,
    usd_per_gpu_hour: float | None,
) -> list[ScalePoint]:
    """Return a point for each power of two that can share the global batch and on which the job fits.

    FSDP's step is not traced again for each number: of what it takes here, what is split over the ranks is split over
    more or fewer, at a microbatch that fits here. For the others a trace serves any number of ranks.
    """
    points = []
    for num_gpus in _numbers(job.train.global_batch_size):
        few = hardware.with_gpus(num_gpus)
        best = choose([each for plan in plans if (each := _with_gpus(job, few, plan, memory)) is not None])
        if best is not None and best.time is not None:
            rate = job.train.global_batch_size * job.counts.tokens_per_position / best.time.seconds
            points.append(ScalePoint(num_gpus, rate, usd_per_gpu_hour, best.strategy, best.layout.microbatch_size))
    return points


def _numbers(global_batch_size: int) -> list[int]:
    """Return the powers of two that divide the batch, up to MAX_GPUS."""
    return [1 << power for power in range(MAX_GPUS.bit_length()) if global_batch_size % (1 << power) == 0]


def _with_gpus(job: PlannedJob, hardware: Hardware, plan: StrategyPlan, memory: PlannedMemory) -> StrategyPlan | None:
    """Return the strategy on these GPUs; None where it does not fit or is not meant for that number."""
    num_gpus, fit = hardware.num_gpus, plan.fit
    strategy: StrategyName = "hsdp" if plan.strategy == "fsdp2" and hardware.num_nodes > 1 else plan.strategy
    if fit is None or (strategy == "single") != (num_gpus == 1) or plan.strategy == "hsdp":
        return None
    share = job.train.global_batch_size // num_gpus
    layout = replace(plan.layout, strategy=strategy, num_ranks=num_gpus, ranks_per_node=hardware.gpus_per_node)
    sizes = [size for size in {fit.microbatch_size, 1} if size and share % size == 0]
    for size in sorted(sizes, reverse=True):
        found = fit.largest if size == fit.microbatch_size and fit.largest is not None else fit.smallest
        if strategy in ("fsdp2", "hsdp"):
            shards = min(num_gpus, hardware.gpus_per_node) if strategy == "hsdp" else num_gpus
            prediction = with_ranks(found, ranks=plan.layout.num_ranks, others=shards)
        else:
            prediction = memory.at(replace(layout, microbatch_size=size))
        if prediction.peak_bytes <= hardware.usable_bytes:
            return timed(job, hardware, with_microbatch(layout, size), Fit(size, fit.smallest, prediction))
    return None
