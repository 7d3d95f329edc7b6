"""What each strategy sends per step over the measured link, against the time that a step computes."""

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.commands.doctor.facts.launch import Facts, JobFacts, LinkFacts

EFFICIENCY = 0.5
"""Of the speed of a large matrix product, what a training step reaches."""

HIDDEN_SHARE = 0.3
"""Of the computing time: less communication than that is mostly hidden behind the backward pass."""

NOMINAL = JobFacts("a model of 1 billion parameters", num_parameters=10**9, num_trained=10**9, item_bytes=2)
"""What is assumed without a job."""


@dataclass(frozen=True)
class StrategyCost:
    """What a strategy communicates in a step."""

    name: str
    num_bytes: float  # sent by each rank
    seconds: float
    share: float | None  # of the computing time; None where that is unknown

    @property
    def verdict(self) -> str:
        """Return whether the strategy suits the link, in a few words."""
        if self.share is None:
            return ""
        if self.share <= HIDDEN_SHARE:
            return "suits this link"
        return "slowed by this link" if self.share <= 1 else "bound by this link"


def bus_bandwidth(link: LinkFacts, *, world: int) -> float:
    """Return the bytes per second that each rank sends in the largest all-reduce, which sends 2 (n-1)/n of its size."""
    largest = link.all_reduce[-1]
    return 2 * (world - 1) / world * largest.num_bytes / largest.seconds


def compute_seconds(facts: Facts) -> float | None:
    """Return the time that a rank computes in a step: 6 operations per parameter and token, 4 with adapters."""
    job, speeds = facts.job, [rank.flops_per_second for rank in facts.ranks if rank.flops_per_second > 0]
    if job is None or not job.num_parameters or not job.tokens_per_step or not speeds:
        return None
    operations = 4 * job.num_parameters + 2 * job.num_trained
    return operations * job.tokens_per_step / facts.world / (EFFICIENCY * min(speeds))


def strategy_costs(facts: Facts) -> Sequence[StrategyCost]:
    """Return the costs of DDP, ZeRO-1/2 and FSDP/ZeRO-3 in a step of the job, or of a model of 1 billion parameters."""
    if facts.link is None or facts.world < 2:
        return ()
    job = facts.job if facts.job is not None and facts.job.num_parameters else NOMINAL
    computed, speed = compute_seconds(facts), bus_bandwidth(facts.link, world=facts.world)
    part = (facts.world - 1) / facts.world
    gradients = job.num_trained * job.gradient_bytes
    trained, weights = job.num_trained * job.item_bytes, job.num_parameters * job.item_bytes
    num_microbatches = max(1, job.global_batch_size // (job.microbatch_size * facts.world))
    sent = {
        "ddp": 2 * part * gradients,
        "zero1, zero2": 2 * part * gradients + part * trained,
        "fsdp2, zero3": part * (2 * num_microbatches * weights + gradients),
    }
    return [
        StrategyCost(name, size, size / speed, None if computed is None else size / speed / computed)
        for name, size in sent.items()
    ]
