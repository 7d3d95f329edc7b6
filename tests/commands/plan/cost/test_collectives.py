"""Times of collectives, worked out by hand: bytes over bandwidth, and hops."""

import pytest

from finetune.commands.plan.cost.collectives import (
    HOP_SECONDS,
    LAUNCH_SECONDS,
    NETWORK_HOP_SECONDS,
    Cluster,
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
)

ONE_NODE = Cluster(8, 8, link_bandwidth=100e9, network_bandwidth=10e9)
TWO_NODES = Cluster(16, 8, link_bandwidth=100e9, network_bandwidth=10e9)


def test_one_rank_sends_nothing():
    alone = Cluster(1, 8, 100e9, 10e9)
    assert all_gather_seconds(1e9, alone) == all_reduce_seconds(1e9, alone) == 0.0


def test_an_all_gather_sends_all_but_the_own_share():
    """8 GB at 100 GB/s: 7/8 of it comes from others, 70 ms; 7 hops."""
    assert all_gather_seconds(8e9, ONE_NODE) == pytest.approx(0.07 + LAUNCH_SECONDS + 7 * HOP_SECONDS)
    assert reduce_scatter_seconds(8e9, ONE_NODE) == all_gather_seconds(8e9, ONE_NODE)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    """2 (n - 1) / n of the bytes: NCCL's factor from algorithm to bus bandwidth, 1.75 for 8 ranks."""
    assert all_reduce_seconds(8e9, ONE_NODE) == pytest.approx(8e9 * 1.75 / 100e9, rel=1e-3)


def test_between_machines_the_slower_of_link_and_network_counts():
    """Half of 16 GB enters each machine at 8 x 10 GB/s, 100 ms; 15/16 of it passes each link, 150 ms."""
    ring = 16e9 * 15 / 16 / 100e9
    latency = LAUNCH_SECONDS + 7 * HOP_SECONDS + NETWORK_HOP_SECONDS
    assert all_gather_seconds(16e9, TWO_NODES) == pytest.approx(ring + latency)
    slow = Cluster(16, 8, link_bandwidth=100e9, network_bandwidth=1e9)
    assert all_gather_seconds(16e9, slow) == pytest.approx(16e9 / 2 / 8e9 + latency)


def test_copies_on_two_machines_speak_pairwise():
    """HSDP's all-reduce: each rank with its partner, each pair on its own path: the whole shard at 10 GB/s."""
    across = TWO_NODES.across_nodes()
    assert (across.num_ranks, across.num_nodes) == (2, 2)
    assert all_reduce_seconds(1e9, across) == pytest.approx(1e9 / 10e9, rel=1e-2)
    assert TWO_NODES.within_node() == ONE_NODE


def test_the_latency_of_a_ring_grows_with_the_machines_and_that_of_a_tree_with_their_logarithm():
    many = Cluster(4096, 8, 100e9, 10e9)
    assert all_gather_seconds(0.0, many) == pytest.approx(511 * NETWORK_HOP_SECONDS, rel=0.02)
    assert all_reduce_seconds(0.0, many) == pytest.approx(18 * NETWORK_HOP_SECONDS, rel=0.4)
