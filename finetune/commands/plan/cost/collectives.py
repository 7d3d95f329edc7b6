"""How long collectives take over the links within a machine and the network between machines.

Bandwidth: every rank sends `(n - 1) / n` of the bytes in an all-gather or reduce-scatter and twice that in an
all-reduce (Patarasuk & Yuan, 2009, "Bandwidth optimal all-reduce algorithms"; NCCL's `busbw`). Over several machines,
what crosses the network is shared by all ranks of a machine, each with its own path, and the slower of the two counts.
Latency: a ring has `n - 1` hops; an all-reduce over machines is a tree, `2 log2(machines)` (NCCL 2.4, 2019).
"""

import math
from dataclasses import dataclass, replace

LINK_SHARE = {"NVLink": 0.8, "Infinity Fabric": 0.7, "PCIe": 0.4, "network": 0.8}
"""Of a link's bandwidth, what a collective reaches: NCCL's bus bandwidth on 8 GPUs is about 360 of 450 GB/s on an H100
and 235 of 300 on an A100; over PCIe, ranks share switches and often go through host memory."""

NETWORK_SHARE = 0.8
"""Of the network's bandwidth."""

LAUNCH_SECONDS = 12e-6
"""Of starting a collective's kernel."""

HOP_SECONDS = 1.5e-6
"""Between two GPUs of one machine."""

NETWORK_HOP_SECONDS = 6e-6
"""Between two machines."""


@dataclass(frozen=True)
class Cluster:
    """Ranks on machines; bandwidths in bytes per second of one rank in one direction, as they are reached."""

    num_ranks: int
    ranks_per_node: int
    link_bandwidth: float
    network_bandwidth: float  # of one rank: the machine's divided by its ranks

    @property
    def num_nodes(self) -> int:
        """Return the number of machines."""
        return -(-self.num_ranks // self.ranks_per_node)

    def within_node(self) -> "Cluster":
        """Return the ranks of one machine alone."""
        return replace(self, num_ranks=min(self.num_ranks, self.ranks_per_node))

    def across_nodes(self) -> "Cluster":
        """Return one rank of each machine, as HSDP's copies speak to each other."""
        return replace(self, num_ranks=self.num_nodes, ranks_per_node=1)


def all_gather_seconds(size_bytes: float, cluster: Cluster) -> float:
    """Return how long it takes until every rank has all of `size_bytes`, of which it had its share.

    >>> round(all_gather_seconds(16e9, Cluster(8, 8, 350e9, 40e9)), 4)  # 16 GB x 7/8 / 350 GB/s
    0.04
    """
    if cluster.num_ranks == 1:
        return 0.0
    return _ring_seconds(size_bytes, cluster) + _latency_seconds(cluster)


reduce_scatter_seconds = all_gather_seconds
"""The same bytes over the same ring, the other way round."""


def all_reduce_seconds(size_bytes: float, cluster: Cluster) -> float:
    """Return how long it takes until every rank has the sum of all ranks' `size_bytes`.

    >>> round(all_reduce_seconds(32e9, Cluster(8, 8, 350e9, 40e9)), 4)  # 2 x 32 GB x 7/8 / 350 GB/s
    0.16
    """
    if cluster.num_ranks == 1:
        return 0.0
    tree = 2 * math.ceil(math.log2(cluster.num_nodes)) * NETWORK_HOP_SECONDS if cluster.num_nodes > 1 else 0.0
    inside = 2 * (min(cluster.num_ranks, cluster.ranks_per_node) - 1) * HOP_SECONDS
    return 2 * _ring_seconds(size_bytes, cluster) + LAUNCH_SECONDS + inside + tree


def _ring_seconds(size_bytes: float, cluster: Cluster) -> float:
    """Return the time of one round of the bytes: over the links, or over the network where that takes longer."""
    ranks, nodes = cluster.num_ranks, cluster.num_nodes
    within = size_bytes * (ranks - 1) / ranks / cluster.link_bandwidth if cluster.ranks_per_node > 1 else 0.0
    node_bandwidth = cluster.network_bandwidth * min(ranks, cluster.ranks_per_node)
    return max(within, size_bytes * (nodes - 1) / nodes / node_bandwidth)


def _latency_seconds(cluster: Cluster) -> float:
    inside = (cluster.num_ranks - cluster.num_nodes) / cluster.num_nodes * HOP_SECONDS
    return LAUNCH_SECONDS + inside + (cluster.num_nodes - 1) * NETWORK_HOP_SECONDS
