"""Hours and cost of the whole job, the interval between checkpoints, and the number of GPUs up to which more pay."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.commands.plan.assumptions import (
    DISK_BANDWIDTH,
    FAILURE_GPU_HOURS,
    MIN_EFFICIENCY,
    RESTART_SECONDS,
    SPOT_HOURS_PER_MACHINE,
)
from finetune.commands.plan.hardware import Hardware
from finetune.commands.plan.planned_job import PlannedJob
from finetune.commands.plan.strategies import StrategyPlan, checkpoint_bytes
from finetune.model.size import optimizer_state_bytes
from finetune.runtime.gpus import Price
from finetune.runtime.supervision.checkpoint_interval import best_interval, expected_time, young_interval


@dataclass(frozen=True)
class ScalePoint:
    """Throughput and price with this number of GPUs. `usd_per_gpu_hour` is None if no price is known."""

    num_gpus: int
    tokens_per_second: float
    usd_per_gpu_hour: float | None = None
    strategy: str = ""
    microbatch_size: int = 1

    @property
    def tokens_per_usd(self) -> float | None:
        """Return the tokens that a dollar pays for.

        >>> ScalePoint(8, 80_000.0, usd_per_gpu_hour=2.0).tokens_per_usd
        18000000.0
        """
        if not self.usd_per_gpu_hour:
            return None
        return self.tokens_per_second * 3600.0 / (self.num_gpus * self.usd_per_gpu_hour)


def efficiency(points: Sequence[ScalePoint]) -> list[float]:
    """Return the throughput per GPU of each point, as a share of that of the most efficient point.

    That is the point with the fewest GPUs, unless these need a slower strategy.

    >>> efficiency([ScalePoint(1, 100.0), ScalePoint(2, 180.0), ScalePoint(4, 300.0)])
    [1.0, 0.9, 0.75]
    """
    per_gpu = [point.tokens_per_second / point.num_gpus for point in points]
    return [one / max(per_gpu) for one in per_gpu]


def most_that_pay(points: Sequence[ScalePoint], *, least: float = MIN_EFFICIENCY) -> ScalePoint:
    """Return the point with the most GPUs whose efficiency is still at least `least`.

    >>> most_that_pay([ScalePoint(1, 100.0), ScalePoint(2, 180.0), ScalePoint(4, 250.0)]).num_gpus
    2
    """
    paying = [point for point, share in zip(points, efficiency(points), strict=True) if share >= least]
    return max(paying, key=lambda point: point.num_gpus)


def amdahl_share(points: Sequence[ScalePoint]) -> float | None:
    """Return the part of a step that does not get shorter with more GPUs, fitted to the first and the last point.

    Amdahl (1967): with a serial share s, n GPUs are 1 / (s + (1 - s) / n) times as fast as one. None for one point.

    >>> round(amdahl_share([ScalePoint(1, 100.0), ScalePoint(8, 100.0 / (0.1 + 0.9 / 8))]), 6)
    0.1
    """
    ordered = sorted(points, key=lambda point: point.num_gpus)
    if len(ordered) < 2:
        return None
    first, last = ordered[0], ordered[-1]
    ratio, speedup = last.num_gpus / first.num_gpus, last.tokens_per_second / first.tokens_per_second
    share = (1.0 / speedup - 1.0 / ratio) / (1.0 - 1.0 / ratio)
    return min(1.0, max(0.0, share))


_COPY_SHARE = 0.5
"""Share of PCIe's bandwidth that copying a checkpoint to host memory reaches."""


@dataclass(frozen=True)
class Assumed:
    """The assumptions about a cluster that the command line may replace; None is the default."""

    hours_between_preemptions: float | None = None  # of the whole job, not of each machine
    disk_bandwidth: float = DISK_BANDWIDTH
    restart_seconds: float = RESTART_SECONDS


@dataclass(frozen=True)
class Saving:
    """The size of a checkpoint and the interval between two. Intervals are of computation, in seconds.

    `interval_seconds` is Daly's, with a lower limit, and at least the time of writing.
    """

    size_bytes: int
    stall_seconds: float  # training waits
    write_seconds: float
    hours_between_failures: float
    young_seconds: float
    interval_seconds: float
    every_steps: int


@dataclass(frozen=True)
class Offer:
    """The job at one price, including preemptions or failures; hours and cost are None if the steps are unknown.

    Without `usd_per_million_tokens` the job would never end: it is preempted before it has restarted.
    """

    price: Price
    is_spot: bool
    hours: float | None = None
    usd: float | None = None
    usd_per_million_tokens: float | None = None


@dataclass(frozen=True)
class Outlook:
    """A strategy's plan for the whole job; None if the number of steps is unknown."""

    tokens_per_second: float
    step_seconds: float
    num_steps: int | None
    num_tokens: float | None
    hours: float | None
    mfu: float
    saving_on_demand: Saving
    saving_spot: Saving
    offers: tuple[Offer, ...]


def make_outlook(
    job: PlannedJob, hardware: Hardware, plan: StrategyPlan, *, prices: tuple[Price, ...], assumed: Assumed
) -> Outlook:
    """Return hours, prices and checkpoints of the plan on this machine."""
    prediction = plan.prediction
    assert plan.time is not None and prediction is not None
    seconds = plan.time.seconds
    tokens = job.train.global_batch_size * job.counts.tokens_per_position
    num_steps, rate = job.counts.num_steps, tokens / seconds
    peak = hardware.gpu.peak_flops(job.peak_dtype(has_tf32="tf32" in hardware.gpu.flops))
    on_demand, spot = (plan_saving(job, hardware, plan, is_spot=is_spot, assumed=assumed) for is_spot in (False, True))
    offers = []
    for is_spot, saving in ((False, on_demand), (True, spot)):
        stretch = expected_time(
            1.0,
            interval=saving.interval_seconds,
            save=saving.stall_seconds,
            restart=assumed.restart_seconds,
            between_failures=saving.hours_between_failures * 3600,
        )
        for price in prices:
            usd_per_gpu_hour = price.spot if is_spot else price.on_demand
            if usd_per_gpu_hour is None:
                continue
            if not math.isfinite(stretch):
                offers.append(Offer(price, is_spot))
                continue
            usd_per_hour = usd_per_gpu_hour * hardware.num_gpus
            hours = None if num_steps is None else num_steps * seconds / 3600 * stretch
            per_million = usd_per_hour / 3600 * stretch / rate * 1e6
            offers.append(Offer(price, is_spot, hours, None if hours is None else hours * usd_per_hour, per_million))
    return Outlook(
        tokens_per_second=rate,
        step_seconds=seconds,
        num_steps=num_steps,
        num_tokens=None if num_steps is None else num_steps * tokens,
        hours=None if num_steps is None else num_steps * seconds / 3600,
        mfu=rate * prediction.flops_per_token / (peak * plan.layout.num_ranks),
        saving_on_demand=on_demand,
        saving_spot=spot,
        offers=tuple(offers),
    )


def plan_saving(job: PlannedJob, hardware: Hardware, plan: StrategyPlan, *, is_spot: bool, assumed: Assumed) -> Saving:
    """Return the checkpoint interval on spot machines, which are preempted, or on machines that only fail."""
    prediction = plan.prediction
    assert prediction is not None and plan.time is not None
    optimizer = job.train.optimizer
    state = optimizer_state_bytes(
        optimizer.name,
        optimizer.state_dtype,
        num_trained=prediction.num_trained,
        trained_bytes=4 * prediction.num_trained,
    )
    size = checkpoint_bytes(job, prediction, optimizer_bytes=state)
    write = size / assumed.disk_bandwidth
    copy = size / plan.layout.num_ranks / (hardware.gpu.pcie_bandwidth * _COPY_SHARE)
    stall = copy if job.config.checkpoint.asynchronous else copy + write
    hours = FAILURE_GPU_HOURS / hardware.num_gpus
    if is_spot:
        preempted = assumed.hours_between_preemptions
        hours = min(hours, SPOT_HOURS_PER_MACHINE / hardware.num_nodes if preempted is None else preempted)
    between = hours * 3600
    young = young_interval(save=stall, between_failures=between)
    interval = best_interval(save=stall, write=write, between_failures=between)
    return Saving(
        size_bytes=size,
        stall_seconds=stall,
        write_seconds=write,
        hours_between_failures=between / 3600,
        young_seconds=young,
        interval_seconds=interval,
        every_steps=max(1, round(interval / plan.time.seconds)),
    )
