"""The time of one optimizer step: a roofline of the device, and communication that does not overlap.

The roofline (Williams et al., 2009, "Roofline: an insightful visual performance model"): matrix products at a share of
the peak, everything between them at a share of the memory's bandwidth, the update likewise, and never faster than the
host can launch kernels. Communication overlaps with computation and slows it down; the excess, and at least the first
or last piece, is exposed. All ranks wait for the slowest.

Collectives take time for bandwidth: every rank sends `(n - 1) / n` of the bytes in an all-gather or reduce-scatter and
twice that in an all-reduce (Patarasuk & Yuan, 2009, "Bandwidth optimal all-reduce algorithms"; NCCL's `busbw`). A ring
goes through all ranks of a machine and then to the next one, so the same bytes cross the network, shared by the paths
of all ranks of the machine (each has its own network card, or a part of one); the slower of the two counts.
Latency: as NCCL estimates it to choose an algorithm (`src/graph/tuning.cc`). A ring has `n - 1` hops; one per
machine but the first crosses the network; an all-reduce goes there and back, by a ring or by a tree over the machines,
`2 log2(machines)`, whichever is shorter. NCCL has no tree for all-gathers and reduce-scatters of several GPUs per
machine: their latency grows with the number of ranks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from finetune.commands.plan.assumptions import (
    BUCKET_BYTES,
    CONTENTION_SHARE,
    HOOK_SECONDS_PER_LAYER,
    HOP_SECONDS,
    HOST_SECONDS_PER_LAYER,
    HOST_UPDATE_BYTES,
    LAUNCH_SECONDS,
    NETWORK_HOP_SECONDS,
    OVERLAP_SHARE,
    STRAGGLER_FREE_RANKS,
    STRAGGLER_NOISE,
    TRAFFIC_PER_INTERMEDIATE,
    UPDATE_BYTES,
    ZERO_GATHER_BYTES,
)
from finetune.runtime.gpus import MEMORY_SHARE


@dataclass(frozen=True)
class Cluster:
    """Ranks on machines; bandwidths in effective bytes per second of one rank in one direction."""

    num_ranks: int
    ranks_per_node: int
    link_bandwidth: float
    network_bandwidth: float  # of one rank: the machine's divided by its ranks
    hop_seconds: float = HOP_SECONDS["NVLink"]
    network_hop_seconds: float = NETWORK_HOP_SECONDS

    @property
    def num_nodes(self) -> int:
        """Return the number of machines."""
        return -(-self.num_ranks // self.ranks_per_node)

    def shard_group(self, num_shards: int) -> "Cluster":
        """Return the neighboring ranks that together hold one copy of state split over this number of ranks."""
        return replace(self, num_ranks=num_shards)

    def replica_group(self, num_shards: int) -> "Cluster":
        """Return the ranks that hold the same shard, one of each copy, as HSDP's copies communicate."""
        per_node = max(1, self.ranks_per_node // num_shards)
        return replace(self, num_ranks=self.num_ranks // num_shards, ranks_per_node=per_node)


def all_gather_seconds(size_bytes: float, cluster: Cluster) -> float:
    """Return how long it takes until every rank, with its share of `size_bytes`, has all of them.

    >>> round(all_gather_seconds(16e9, Cluster(8, 8, 350e9, 40e9)), 4)  # 16 GB x 7/8 / 350 GB/s
    0.04
    """
    if cluster.num_ranks == 1:
        return 0.0
    return _ring_seconds(size_bytes, cluster) + LAUNCH_SECONDS + _ring_hops(cluster)


reduce_scatter_seconds = all_gather_seconds
"""The same bytes over the same ring in the opposite direction."""


def all_reduce_seconds(size_bytes: float, cluster: Cluster) -> float:
    """Return the time until every rank has the sum of all ranks' `size_bytes`.

    >>> round(all_reduce_seconds(32e9, Cluster(8, 8, 350e9, 40e9)), 3)  # 2 x 32 GB x 7/8 / 350 GB/s
    0.16
    """
    if cluster.num_ranks == 1:
        return 0.0
    # Through one machine and up the tree of the machines, and back.
    within = min(cluster.num_ranks, cluster.ranks_per_node) - 1
    levels = math.ceil(math.log2(cluster.num_nodes))
    tree_hops = 2 * (within * cluster.hop_seconds + levels * cluster.network_hop_seconds)
    return 2 * _ring_seconds(size_bytes, cluster) + LAUNCH_SECONDS + min(tree_hops, 2 * _ring_hops(cluster))


def _ring_seconds(size_bytes: float, cluster: Cluster) -> float:
    """Return the time of one round of the bytes: over the links, or over the network where that takes longer."""
    ranks, per_node = cluster.num_ranks, min(cluster.num_ranks, cluster.ranks_per_node)
    slowest = cluster.link_bandwidth if per_node > 1 else math.inf
    if cluster.num_nodes > 1:
        slowest = min(slowest, cluster.network_bandwidth * per_node)
    return size_bytes * (ranks - 1) / ranks / slowest


def _ring_hops(cluster: Cluster) -> float:
    """Return the seconds of a message on its way from rank to rank through all of them."""
    within = cluster.num_ranks - cluster.num_nodes
    return within * cluster.hop_seconds + (cluster.num_nodes - 1) * cluster.network_hop_seconds


@dataclass(frozen=True)
class Device:
    """The effective speed of a device: FLOP/s of matrix products, and bytes per second.

    `attention_share` is the speed of attention, as a share of that of other products.
    """

    flops: float
    memory_bandwidth: float
    pcie_bandwidth: float
    host_bandwidth: float = 20e9  # of the host's memory, for one rank
    attention_share: float = 1.0


@dataclass(frozen=True)
class Work:
    """The computation of one rank in a step, and the sizes of the model, in bytes and FLOPs.

    `weight_bytes` count all weights in the data type of the computation (in which they are gathered),
    `gradient_bytes` the reduced gradients, `trained_weight_bytes` the trained weights that are gathered
    after an update.
    """

    num_tokens: float  # of one microbatch, padding included
    num_microbatches: int
    flops_per_token: float
    recomputed_flops_per_token: float
    traffic_per_token: float  # bytes between matrix products, forward and backward
    num_layers: int
    num_parameters: int
    num_trained: int
    weight_bytes: float
    gradient_bytes: float
    trained_weight_bytes: float
    num_casts: int = 0  # of float32 weights per microbatch (autocast)
    dequantized_bytes: float = 0.0  # written per microbatch if weights have 4 or 8 bits
    num_collective_layers: int = 0  # gathered one by one; 0: num_layers
    attention_flops_per_token: float = 0.0  # of attention, in all passes
    tensor_size: int = 1  # ranks of a machine that compute the same microbatch; everything else is of one of them
    num_sums: int = 0  # over these ranks, in all passes of a microbatch
    summed_bytes_per_token: float = 0.0  # of one of them

    @property
    def tokens_per_step(self) -> float:
        """Return the tokens of all microbatches of one rank."""
        return self.num_tokens * self.num_microbatches

    def shared(self, size: int, *, hidden: int, intermediate: int, item_bytes: float) -> "Work":
        """Return the work of one of `size` ranks that share every layer, of these widths.

        It has its part of all products. Hidden states are summed after attention and MLP, forward and backward, and
        again if they are recomputed; what is between the products is computed on whole ones.
        """
        inner = self.num_layers * TRAFFIC_PER_INTERMEDIATE * intermediate * (item_bytes / 2)
        return replace(
            self,
            flops_per_token=self.flops_per_token / size,
            recomputed_flops_per_token=self.recomputed_flops_per_token / size,
            attention_flops_per_token=self.attention_flops_per_token / size,
            traffic_per_token=self.traffic_per_token - inner * (1 - 1 / size),
            num_parameters=self.num_parameters // size,
            num_trained=self.num_trained // size,
            weight_bytes=self.weight_bytes / size,
            gradient_bytes=self.gradient_bytes / size,
            trained_weight_bytes=self.trained_weight_bytes / size,
            tensor_size=size,
            num_sums=self.num_layers * (6 if self.recomputed_flops_per_token else 4),
            summed_bytes_per_token=hidden * item_bytes,
        )


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause; `hidden` communication is not part of the total."""

    parts: Mapping[str, float] = field(default_factory=dict)
    hidden_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the time of the step."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Pass:
    """Time of one microbatch."""

    forward: float
    backward: float


def step_time(
    strategy: str, work: Work, *, device: Device, cluster: Cluster, hsdp_shards: int | None = None
) -> StepTime:
    """Return the time of a step under the strategy (a name of `accelerate_configs`), with gradients accumulated.

    `hsdp_shards` ranks hold one copy under HSDP; None: the ranks of a machine.
    """
    if work.tensor_size > 1:  # FSDP2 over the groups, if there are several; the next product needs the sums of a group
        groups = cluster.replica_group(work.tensor_size)
        inner = "fsdp2" if groups.num_ranks > 1 else "single"
        time = step_time(inner, replace(work, tensor_size=1), device=device, cluster=groups)
        summed = work.num_tokens * work.summed_bytes_per_token
        one_sum = all_reduce_seconds(summed, cluster.shard_group(work.tensor_size))
        sums = work.num_microbatches * work.num_sums * one_sum
        return replace(time, parts={**time.parts, "communication": time.parts["communication"] + sums})
    shards = num_shards(strategy, cluster, hsdp_shards=hsdp_shards)
    # A microbatch: a third of the FLOPs forward, the rest and recomputation backward.
    memory = device.memory_bandwidth * MEMORY_SHARE
    total = work.flops_per_token + work.recomputed_flops_per_token
    recomputed = work.recomputed_flops_per_token / max(total, 1.0)
    slower = work.attention_flops_per_token * (1 / device.attention_share - 1)  # as if attention had more FLOPs
    products = max(work.num_tokens * (total + slower) / device.flops, 3 * work.weight_bytes / memory)
    recomputes = work.recomputed_flops_per_token > 0
    between = work.num_tokens * work.traffic_per_token * (4 / 3 if recomputes else 1.0) / memory
    casts = (6.0 * work.num_casts * work.num_parameters + work.dequantized_bytes) / memory
    per_layer = HOST_SECONDS_PER_LAYER * (4 / 3 if recomputes else 1.0) + HOOK_SECONDS_PER_LAYER.get(strategy, 0.0)
    host = per_layer * work.num_layers
    seconds = max(products + between + casts, host)
    forward = seconds * (1 - recomputed) / 3
    computed = _Pass(forward, seconds - forward)
    exposed, hidden = _communication(strategy, work, computed=computed, cluster=cluster, shards=shards)
    computation = work.num_microbatches * (computed.forward + computed.backward)
    offloads, own = strategy.endswith("_offload"), work.num_trained / shards
    update = HOST_UPDATE_BYTES * own / device.host_bandwidth if offloads else UPDATE_BYTES * own / memory
    parts = {
        "computation": computation,
        "communication": exposed,
        "contention": CONTENTION_SHARE * hidden,
        "stragglers": straggler_share(cluster.num_ranks) * computation,
        "update": update,  # with clipping
    }
    if offloads:
        # Over PCIe, gradients go out and weights back; with ZeRO-3 weights also in, twice a microbatch.
        ranks = cluster.num_ranks
        transfers = (work.gradient_bytes + work.trained_weight_bytes) / ranks / device.pcie_bandwidth
        if strategy == "zero3_offload":
            transfers += 2 * work.num_microbatches * work.weight_bytes / ranks / device.pcie_bandwidth
        parts["transfers"] = transfers
    return StepTime(parts, hidden)


def num_shards(strategy: str, cluster: Cluster, *, hsdp_shards: int | None = None) -> int:
    """Return the number of shards of the strategy; 1 if it does not shard."""
    if strategy in ("single", "ddp"):
        return 1
    if strategy != "hsdp":
        return cluster.num_ranks
    return min(cluster.num_ranks, hsdp_shards or cluster.ranks_per_node)


def straggler_share(num_ranks: int) -> float:
    """Return the extra time of the slowest rank, compared with that of 8 ranks, as a share of the mean.

    The expected largest of n normal numbers (Blom, 1958, "Statistical estimates and transformed beta-variables") grows
    like the square root of log n.

    >>> [round(straggler_share(ranks), 3) for ranks in (8, 64, 512, 4096)]
    [0.0, 0.032, 0.057, 0.078]
    """
    return STRAGGLER_NOISE * max(0.0, _expected_largest(num_ranks) - _expected_largest(STRAGGLER_FREE_RANKS))


def _expected_largest(count: int) -> float:
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _communication(strategy: str, work: Work, *, computed: _Pass, cluster: Cluster, shards: int) -> tuple[float, float]:
    """Return the seconds of exposed and of hidden communication in a step."""
    if cluster.num_ranks == 1:
        return 0.0, 0.0
    name = strategy.removesuffix("_offload")
    if name == "ddp":
        return _reduced_in_buckets(work, computed=computed, cluster=cluster)
    if name in ("zero1", "zero2"):
        # Gradients are reduced once a step, by ZeRO-2 after each microbatch; both gather updated weights afterwards.
        # DeepSpeed (0.19) all-reduces whole buckets although a rank needs only its share.
        times = work.num_microbatches if name == "zero2" else 1
        exposed, hidden = _reduced_in_buckets(work, computed=computed, cluster=cluster)
        pieces = max(1, math.ceil(work.trained_weight_bytes / ZERO_GATHER_BYTES))
        gather = pieces * all_gather_seconds(work.trained_weight_bytes / pieces, cluster)
        return times * exposed + gather, times * hidden
    # FSDP and ZeRO-3 gather weights for each pass and reduce gradients; HSDP within a copy, then across copies.
    group = cluster.shard_group(shards)
    pieces = max(1, work.num_collective_layers or work.num_layers)
    gather = pieces * all_gather_seconds(work.weight_bytes / pieces, group)
    reduce = pieces * reduce_scatter_seconds(work.gradient_bytes / pieces, group)
    forward = _overlapped(gather, computed.forward, pieces=pieces)
    backward = _overlapped(gather + reduce, computed.backward, pieces=pieces)
    exposed, hidden = (work.num_microbatches * (one + other) for one, other in zip(forward, backward, strict=True))
    if shards < cluster.num_ranks:
        across = pieces * all_reduce_seconds(work.gradient_bytes / shards / pieces, cluster.replica_group(shards))
        free = max(0.0, computed.backward - backward[1] / OVERLAP_SHARE)  # left to overlap in the last backward pass
        last = _overlapped(across, free, pieces=pieces)
        exposed, hidden = exposed + last[0], hidden + last[1]
    return exposed, hidden


def _reduced_in_buckets(work: Work, *, computed: _Pass, cluster: Cluster) -> tuple[float, float]:
    """Return the exposed and hidden seconds of reducing all gradients once during a backward pass."""
    buckets = max(1, math.ceil(work.gradient_bytes / BUCKET_BYTES))
    seconds = buckets * all_reduce_seconds(work.gradient_bytes / buckets, cluster)
    return _overlapped(seconds, computed.backward, pieces=buckets)


def _overlapped(seconds: float, computation_seconds: float, *, pieces: int) -> tuple[float, float]:
    """Return the exposed seconds, at least one piece, and the seconds that overlap with the computation."""
    exposed = max(seconds / pieces, seconds - OVERLAP_SHARE * computation_seconds)
    return exposed, seconds - exposed
