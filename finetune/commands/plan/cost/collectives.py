"""The time of collectives over the links within a machine and the network between machines.

Bandwidth: every rank sends `(n - 1) / n` of the bytes in an all-gather or reduce-scatter and twice that in an
all-reduce (Patarasuk & Yuan, 2009, "Bandwidth optimal all-reduce algorithms"; NCCL's `busbw`). A ring goes through all
ranks of a machine and then to the next one, so the same bytes cross the network, shared by the paths of all ranks of
the machine (each has its own network card, or a part of one); the slower of the two counts.
Latency: as NCCL estimates it to choose an algorithm (`src/graph/tuning.cc`). A ring has `n - 1` hops, of which one per
machine but the first crosses the network; an all-reduce goes there and back, by a ring or by a tree over the machines,
`2 log2(machines)`, whichever is shorter. NCCL has no tree for all-gathers and reduce-scatters of several GPUs per
machine: their latency grows with the number of ranks.
"""

import math
from dataclasses import dataclass, replace

from finetune.commands.plan.cost.assumptions import HOP_SECONDS, LAUNCH_SECONDS, NETWORK_HOP_SECONDS


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
    """Return how long it takes until every rank has all of `size_bytes`, of which it had its share.

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
