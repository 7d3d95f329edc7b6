"""The job on 1, 2, 4, 8, ... GPUs of the kind, each number with the strategy that is fastest there."""

from collections.abc import Sequence
from dataclasses import replace

from finetune.commands.plan.cost.scaling import ScalePoint
from finetune.commands.plan.hardware import Hardware
from finetune.commands.plan.job import Job
from finetune.commands.plan.memory import Fit, with_ranks
from finetune.commands.plan.strategies import StrategyPlan, choose, timed, with_microbatch
from finetune.run.symbolic.prediction import StrategyName

MOST_GPUS = 256


def scale_points(
    job: Job, hardware: Hardware, plans: Sequence[StrategyPlan], *, usd_per_gpu_hour: float | None
) -> list[ScalePoint]:
    """Return a point for each power of two that can share the global batch and on which the job fits.

    Memory is not predicted anew: of what each strategy takes here, what it divides over the ranks is divided by more
    or fewer, at a microbatch that fits here.
    """
    points = []
    for num_gpus in _numbers(job.train.global_batch_size):
        best = _best(job, hardware.with_gpus(num_gpus), plans)
        if best is not None and best.time is not None:
            tokens = job.train.global_batch_size * job.counts.tokens_per_position
            points.append(
                ScalePoint(
                    num_gpus, tokens / best.time.seconds, usd_per_gpu_hour, best.strategy, best.layout.microbatch_size
                )
            )
    return points


def _numbers(global_batch_size: int) -> list[int]:
    """Return the powers of two that divide the batch, up to MOST_GPUS."""
    return [1 << power for power in range(MOST_GPUS.bit_length()) if global_batch_size % (1 << power) == 0]


def _best(job: Job, hardware: Hardware, plans: Sequence[StrategyPlan]) -> StrategyPlan | None:
    found = [each for plan in plans if (each := _with_gpus(job, hardware, plan)) is not None]
    return choose(found)


def _with_gpus(job: Job, hardware: Hardware, plan: StrategyPlan) -> StrategyPlan | None:
    """Return the strategy on these GPUs; None where it does not fit or is not meant for so many."""
    num_gpus, fit = hardware.num_gpus, plan.fit
    strategy: StrategyName = "hsdp" if plan.strategy == "fsdp2" and hardware.num_nodes > 1 else plan.strategy
    is_single = strategy == "single"
    if fit is None or is_single != (num_gpus == 1) or (plan.strategy == "hsdp"):
        return None
    layout = replace(plan.layout, strategy=strategy, num_ranks=num_gpus, ranks_per_node=hardware.gpus_per_node)
    ranks, others = (1, 1) if is_single else (plan.layout.num_ranks, num_gpus)
    shards = min(others, hardware.gpus_per_node) if strategy == "hsdp" else others
    share = job.train.global_batch_size // num_gpus
    smallest = with_ranks(fit.smallest, plan.strategy, ranks=ranks, others=shards)
    largest = fit.largest and with_ranks(fit.largest, plan.strategy, ranks=ranks, others=shards)
    for size, prediction in ((fit.microbatch_size, largest), (1, smallest)):
        if prediction is not None and size and share % size == 0 and prediction.peak_bytes <= hardware.usable_bytes:
            return timed(job, hardware, with_microbatch(layout, size), Fit(size, smallest, prediction))
    return None
