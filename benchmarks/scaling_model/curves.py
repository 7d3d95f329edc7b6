"""Step time and efficiency of each strategy at 8 to 4,096 GPUs, and the largest number that still pays."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.commands.plan.assumptions import USABLE_SHARE
from finetune.commands.plan.step_time import StepTime, step_time

from scaling_model.machines import Machine
from scaling_model.models import Model

WORLDS = tuple(8 << power for power in range(10))
"""8 to 4,096."""

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp")

_ACTIVATION_BYTES_PER_HIDDEN = 40.0
"""Of a token in the one layer that is being recomputed, per unit of the hidden width: the MLP's and attention's."""


@dataclass(frozen=True)
class Load:
    """What each step computes: samples of so many tokens, of each rank, or (`global_batch`) of all ranks together."""

    length: int = 4096
    samples: int = 1
    microbatches: int = 1
    global_batch: int | None = None

    def share(self, num_gpus: int) -> tuple[int, int] | None:
        """Return samples and microbatches of one rank; None where the batch has fewer samples than there are ranks.

        >>> Load(samples=4, global_batch=1024).share(128), Load(samples=4, global_batch=1024).share(2048)
        ((4, 2), None)
        """
        if self.global_batch is None:
            return self.samples, self.microbatches
        own = self.global_batch // num_gpus
        if own * num_gpus != self.global_batch or own == 0:
            return None
        samples = math.gcd(own, self.samples)
        return samples, own // samples


@dataclass(frozen=True)
class Spot:
    """One strategy on one number of GPUs. `shards` hold a copy: of interest for HSDP."""

    num_gpus: int
    strategy: str
    shards: int
    tokens_per_step: float
    time: StepTime

    @property
    def efficiency(self) -> float:
        """Return which part of the step computes: what is left of a GPU that waits for nobody."""
        return self.time.parts["computation"] / self.time.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Return the speed of one GPU."""
        return self.tokens_per_step / self.time.seconds / self.num_gpus


def spot(strategy: str, num_gpus: int, model: Model, machine: Machine, load: Load) -> Spot | None:
    """Return the strategy there, HSDP with its fastest number of shards; None where it does not fit in memory.

    None also where the global batch has fewer samples than ranks, and for HSDP within one machine.
    """
    share = load.share(num_gpus)
    if share is None:
        return None
    cluster = machine.of(num_gpus)
    work = model.work(
        length=load.length,
        samples=share[0],
        microbatches=share[1],
        recomputed=1.0,
    )
    found = []
    for shards in shard_choices(strategy, num_gpus, machine):
        tokens = load.length * share[0]
        if memory_bytes(strategy, model, num_gpus, shards=shards, tokens=tokens) > USABLE_SHARE * machine.memory_bytes:
            continue
        time = step_time(strategy, work, device=machine.device, cluster=cluster, hsdp_shards=shards)
        found.append(Spot(num_gpus, strategy, shards, work.tokens_per_step * num_gpus, time))
    return min(found, key=lambda each: each.time.seconds, default=None)


def shard_choices(strategy: str, num_gpus: int, machine: Machine) -> list[int]:
    """Return over how many ranks a copy may be split: HSDP over whole machines, fewer than there are."""
    if strategy == "ddp":
        return [1]
    if strategy != "hsdp":
        return [num_gpus]
    per_node = machine.cluster.ranks_per_node
    return [per_node << power for power in range(16) if per_node << power < num_gpus]


def memory_bytes(strategy: str, model: Model, num_gpus: int, *, shards: int, tokens: int) -> float:
    """Return about what a rank holds: float32 weights, gradients and two moments, and activations, recomputed.

    ZeRO-1 and -2 compute with bfloat16 weights and hold the float32 ones split. `finetune plan` predicts a job's own.
    """
    parameters = model.parameters
    states = {
        "ddp": 16.0,
        "zero1": 2.0 + 4.0 + 12.0 / num_gpus,
        "zero2": 2.0 + 16.0 / num_gpus,
    }.get(strategy, 16.0 / shards)
    gathered = 0.0 if strategy in ("ddp", "zero1", "zero2") else 2 * 2 * parameters / model.layers
    kept = 2.0 * model.layers * model.hidden * tokens
    layer = _ACTIVATION_BYTES_PER_HIDDEN * model.hidden * tokens
    logits = 8.0 * model.vocabulary * min(tokens, 4096)
    return states * parameters + gathered + kept + layer + logits


def curve(strategy: str, model: Model, machine: Machine, load: Load) -> list[Spot | None]:
    """Return the strategy on each of WORLDS."""
    return [spot(strategy, num_gpus, model, machine, load) for num_gpus in WORLDS]


def largest_that_pays(spots: Sequence[Spot | None], *, least: float) -> Spot | None:
    """Return the place with the most GPUs up to which the efficiency stays at least this; None where it never is."""
    best = None
    for each in spots:
        if each is None:
            continue
        if each.efficiency < least:
            break
        best = each
    return best
