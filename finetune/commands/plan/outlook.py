"""Hours and cost of the whole job, and the interval between its checkpoints."""

import math
from dataclasses import dataclass

from finetune.commands.plan.assumptions import DISK_BANDWIDTH, FAILURE_GPU_HOURS, RESTART_SECONDS
from finetune.commands.plan.hardware import Hardware
from finetune.commands.plan.planned_job import PlannedJob
from finetune.commands.plan.strategies import StrategyPlan
from finetune.model.size import optimizer_state_bytes
from finetune.runtime.gpus import Price
from finetune.runtime.supervision.checkpoint_interval import best_interval, expected_time

_COPY_SHARE = 0.5
"""Share of PCIe's bandwidth that copying a checkpoint to host memory reaches."""


@dataclass(frozen=True)
class Checkpoints:
    """The size of a checkpoint and the best interval between two, of computation: Daly's, with lower limits."""

    size_bytes: int
    stall_seconds: float  # training waits
    write_seconds: float
    hours_between_failures: float
    interval_seconds: float
    every_steps: int


@dataclass(frozen=True)
class Offer:
    """The job at a provider's price, including failures; `usd` is None if the number of steps is unknown."""

    provider: str
    usd_per_gpu_hour: float
    usd: float | None
    usd_per_million_tokens: float
    source: str


@dataclass(frozen=True)
class Outlook:
    """A strategy's plan for the whole job.

    `hours` include failures; they are None if the number of steps is unknown, or if the job never ends, since it is
    preempted before it has restarted. Then there are no offers.
    """

    step_seconds: float
    tokens_per_second: float
    mfu: float
    num_steps: int | None
    num_tokens: float | None
    hours: float | None
    checkpoints: Checkpoints
    offers: tuple[Offer, ...]  # the cheapest first


def make_outlook(
    job: PlannedJob,
    hardware: Hardware,
    plan: StrategyPlan,
    *,
    prices: tuple[Price, ...],
    hours_between_preemptions: float | None,
) -> Outlook:
    """Return hours, prices and checkpoints of the plan on demand, or on spot machines, which are preempted so often."""
    assert plan.time is not None and plan.prediction is not None
    seconds, num_steps, tokens = plan.time.seconds, job.counts.num_steps, job.tokens_per_step
    hours_between_failures = FAILURE_GPU_HOURS / hardware.num_gpus
    if hours_between_preemptions is not None:
        hours_between_failures = min(hours_between_failures, hours_between_preemptions)
    checkpoints = plan_checkpoints(job, hardware, plan, hours_between_failures=hours_between_failures)
    stretch = expected_time(
        1.0,
        interval=checkpoints.interval_seconds,
        save=checkpoints.stall_seconds,
        restart=RESTART_SECONDS,
        between_failures=hours_between_failures * 3600,
    )
    hours_per_step, offers = seconds / 3600 * stretch, []
    for price in prices if math.isfinite(stretch) else ():
        usd_per_gpu_hour = price.on_demand if hours_between_preemptions is None else price.spot
        if usd_per_gpu_hour is not None:
            usd = hours_per_step * hardware.num_gpus * usd_per_gpu_hour  # of a step
            total = None if num_steps is None else num_steps * usd
            offers.append(Offer(price.provider, usd_per_gpu_hour, total, usd / tokens * 1e6, price.source))
    peak = hardware.gpu.peak_flops(job.peak_dtype(has_tf32="tf32" in hardware.gpu.flops))
    return Outlook(
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        mfu=tokens / seconds * plan.prediction.flops_per_token / (peak * plan.layout.num_ranks),
        num_steps=num_steps,
        num_tokens=None if num_steps is None else num_steps * tokens,
        hours=None if num_steps is None or not math.isfinite(stretch) else num_steps * hours_per_step,
        checkpoints=checkpoints,
        offers=tuple(sorted(offers, key=lambda offer: offer.usd_per_gpu_hour)),
    )


def plan_checkpoints(
    job: PlannedJob, hardware: Hardware, plan: StrategyPlan, *, hours_between_failures: float
) -> Checkpoints:
    """Return the size of a checkpoint, trained weights and the optimizer's state, and the best interval between two."""
    prediction, optimizer = plan.prediction, job.train.optimizer
    assert prediction is not None and plan.time is not None
    num_trained = prediction.num_trained
    item_bytes = 4 if job.config.model.dtype == "float32" or num_trained < prediction.num_parameters else 2
    size = num_trained * item_bytes + optimizer_state_bytes(
        optimizer.name, optimizer.state_dtype, num_trained=num_trained, trained_bytes=4 * num_trained
    )
    write = size / DISK_BANDWIDTH
    copy = size / plan.layout.num_ranks / (hardware.gpu.pcie_bandwidth * _COPY_SHARE)
    stall = copy if job.config.checkpoint.asynchronous else copy + write
    interval = best_interval(save=stall, write=write, between_failures=hours_between_failures * 3600)
    every_steps = max(1, round(interval / plan.time.seconds))
    return Checkpoints(size, stall, write, hours_between_failures, interval, every_steps)
