"""Step time and efficiency of each strategy at 8 to 4,096 GPUs, and the largest number that still pays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from finetune.commands.plan.assumptions import USABLE_SHARE
from finetune.commands.plan.hardware import Hardware, parse_hardware
from finetune.commands.plan.step_time import Cluster, StepTime, step_time

from scaling_model.models import Model

WORLDS = tuple(8 << power for power in range(10))
"""8 to 4,096."""

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp")
LENGTH = 4096
"""Tokens of the one sample that each GPU has in a step."""

_ACTIVATION_BYTES_PER_HIDDEN = 40.0
"""Of a token in the one layer that is being recomputed, per unit of the hidden width: the MLP's and attention's."""


@dataclass(frozen=True)
class Machine:
    """One of many equal machines with 8 GPUs."""

    name: str
    hardware: Hardware

    def cluster(self, num_gpus: int) -> Cluster:
        """Return that many GPUs on such machines."""
        return replace(self.hardware.cluster, num_ranks=num_gpus)


def machine(gpu: str, network_gbit: float, name: str = "") -> Machine:
    """Return a machine with 8 of these GPUs; `network_gbit` is of the whole machine."""
    return Machine(name or gpu, parse_hardware(f"8x{gpu}", num_nodes=1, network_gbit=network_gbit))


MACHINES = (
    machine("H100-80GB", 3200, "8x H100, InfiniBand 8 x 400 Gbit/s"),
    machine("A100-80GB", 1600, "8x A100-80GB, InfiniBand 8 x 200 Gbit/s"),
    machine("H100-80GB", 100, "8x H100, Ethernet 100 Gbit/s"),
)


@dataclass(frozen=True)
class ScalingPoint:
    """One strategy on one number of GPUs. `shards` hold a copy: of interest for HSDP."""

    num_gpus: int
    shards: int
    tokens_per_step: float
    time: StepTime

    @property
    def efficiency(self) -> float:
        """Return the share of the step that computes."""
        return self.time.parts["computation"] / self.time.seconds


def point(strategy: str, num_gpus: int, model: Model, where: Machine) -> ScalingPoint | None:
    """Return the strategy there, HSDP with its fastest number of shards; None where it does not fit in memory.

    None also for HSDP within one machine.
    """
    work = model.work(LENGTH, 1, 1, 1.0)
    limit = USABLE_SHARE * where.hardware.gpu.memory_bytes
    points = [
        ScalingPoint(
            *(num_gpus, shards, work.tokens_per_step * num_gpus),
            step_time(
                *(strategy, work),
                device=where.hardware.device("bf16"),
                cluster=where.cluster(num_gpus),
                hsdp_shards=shards,
            ),
        )
        for shards in shard_choices(strategy, num_gpus, where.hardware.cluster.ranks_per_node)
        if memory_bytes(strategy, model, num_gpus, shards=shards, tokens=LENGTH) <= limit
    ]
    return min(points, key=lambda each: each.time.seconds, default=None)


def shard_choices(strategy: str, num_gpus: int, per_node: int) -> list[int]:
    """Return over how many ranks a copy may be split: HSDP over whole machines, fewer than there are."""
    if strategy != "hsdp":
        return [1 if strategy == "ddp" else num_gpus]
    return [per_node << power for power in range(16) if per_node << power < num_gpus]


def memory_bytes(strategy: str, model: Model, num_gpus: int, *, shards: int, tokens: int) -> float:
    """Return about what a rank holds: float32 weights, gradients and two moments, and activations, recomputed.

    ZeRO-1 and -2 compute with bfloat16 weights and hold the float32 ones split. `finetune plan` predicts a job's own.
    """
    states = {"ddp": 16.0, "zero1": 2.0 + 4.0 + 12.0 / num_gpus, "zero2": 2.0 + 16.0 / num_gpus}
    gathered = 0.0 if strategy in states else 2 * 2 * model.parameters / model.layers
    kept = 2.0 * model.layers * model.hidden * tokens
    layer = _ACTIVATION_BYTES_PER_HIDDEN * model.hidden * tokens
    logits = 8.0 * model.vocabulary * min(tokens, 4096)
    return states.get(strategy, 16.0 / shards) * model.parameters + gathered + kept + layer + logits


def curve(strategy: str, model: Model, where: Machine) -> list[ScalingPoint | None]:
    """Return the strategy on each of WORLDS."""
    return [point(strategy, num_gpus, model, where) for num_gpus in WORLDS]


def largest_that_pays(points: Sequence[ScalingPoint | None], *, least: float) -> ScalingPoint | None:
    """Return the point with the most GPUs up to which the efficiency stays at least this; None where it never is."""
    best = None
    for each in filter(None, points):
        if each.efficiency < least:
            break
        best = each
    return best
