"""Times of collectives, worked out by hand: bytes over bandwidth, and hops."""

import pytest

from finetune.commands.plan.assumptions import HOP_SECONDS, LAUNCH_SECONDS, NETWORK_HOP_SECONDS
from finetune.commands.plan.step_time import (
    Cluster,
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
)

HOP = HOP_SECONDS["NVLink"]
ONE_NODE = Cluster(8, 8, link_bandwidth=100e9, network_bandwidth=10e9)
TWO_NODES = Cluster(16, 8, link_bandwidth=100e9, network_bandwidth=10e9)


def test_one_rank_sends_nothing():
    alone = Cluster(1, 8, 100e9, 10e9)
    assert all_gather_seconds(1e9, alone) == all_reduce_seconds(1e9, alone) == 0.0


def test_an_all_gather_sends_all_but_the_own_share():
    """8 GB at 100 GB/s: 7/8 of it comes from others, 70 ms; 7 hops."""
    assert all_gather_seconds(8e9, ONE_NODE) == pytest.approx(0.07 + LAUNCH_SECONDS + 7 * HOP)
    assert reduce_scatter_seconds(8e9, ONE_NODE) == all_gather_seconds(8e9, ONE_NODE)


def test_between_machines_the_slower_of_link_and_network_counts():
    """Of 16 GB, 15/16 pass each link, 150 ms at 100 GB/s, and leave each machine, 188 ms at 8 x 10 GB/s."""
    latency = LAUNCH_SECONDS + 14 * HOP + NETWORK_HOP_SECONDS
    assert all_gather_seconds(16e9, TWO_NODES) == pytest.approx(15e9 / 80e9 + latency)
    fast = Cluster(16, 8, link_bandwidth=100e9, network_bandwidth=50e9)
    assert all_gather_seconds(16e9, fast) == pytest.approx(15e9 / 100e9 + latency)


def test_copies_on_two_machines_speak_pairwise():
    """HSDP's all-reduce: each rank with its partner, each pair on its own path: the whole shard at 10 GB/s."""
    across = TWO_NODES.replica_group(8)
    assert (across.num_ranks, across.num_nodes) == (2, 2)
    assert all_reduce_seconds(1e9, across) == pytest.approx(1e9 / 10e9, rel=1e-2)
    assert TWO_NODES.shard_group(8) == ONE_NODE


def test_the_latency_of_a_ring_grows_with_the_ranks_and_that_of_a_tree_with_the_logarithm_of_the_machines():
    many = Cluster(4096, 8, 100e9, 10e9)
    assert all_gather_seconds(0.0, many) == pytest.approx(LAUNCH_SECONDS + 3584 * HOP + 511 * NETWORK_HOP_SECONDS)
    assert all_reduce_seconds(0.0, many) == pytest.approx(LAUNCH_SECONDS + 2 * (7 * HOP + 9 * NETWORK_HOP_SECONDS))
