"""The chains of a seed are the same every time, and together meet everything that the harness promises."""

from collections import Counter

import pytest

from finetune.runtime.supervision.heartbeat import POINTS, read_faults
from tests.faults.runner import _at_point as written
from tests.faults.schedule import ENDING, PLACES, STEPS, Kind, chains_with, draw_chain


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_draws_the_same_chains(seed: int):
    assert chains_with(seed, 60) == chains_with(seed, 60)
    assert chains_with(seed, 60) != chains_with(seed + 1, 60)
    assert draw_chain(seed, 7) == chains_with(seed, 60)[7]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_200_faults_meet_every_place_kind_and_point(seed: int):
    chains = chains_with(seed, 200)
    faults = [fault for chain in chains for fault in chain.faults]
    assert 200 <= len(faults) < 215
    assert {attempt.place for chain in chains for attempt in chain.attempts} == set(PLACES)
    assert {fault.kind for fault in faults} == set(Kind.__args__)  # type: ignore[attr-defined]
    assert abs(sum(chain.is_moved for chain in chains) / len(chains) - 1 / 3) < 0.1
    assert {chain.adapter for chain in chains} == {chain.asynchronous for chain in chains} == {True, False}
    cold = Counter(attempt.place.strategy for chain in chains for attempt in chain.attempts if attempt.is_cold)
    assert set(cold) == {place.strategy for place in PLACES}
    assert 0.1 < cold.total() / sum(len(chain.attempts) for chain in chains) < 0.3
    points = {fault.moment.point for fault in faults if fault.moment.point}
    assert points <= set(POINTS) and len(points) >= 20


def test_the_20_faults_of_ci_hold_every_family():
    chains = chains_with(0, 20)
    assert any(chain.has_own_disk for chain in chains) and any(chain.adapter for chain in chains)
    assert any(chain.is_moved for chain in chains)


def test_every_fault_at_a_point_is_one_that_the_product_knows():
    faults = [fault for chain in chains_with(3, 300) for fault in chain.faults if fault.moment.point]
    assert len(faults) > 50
    for fault in faults:
        (read,) = read_faults(written(fault))
        assert (read.point, read.step) == (fault.moment.point, fault.moment.step)


def test_an_attempt_ends_with_the_fault_that_ends_it_and_all_steps_lie_within_the_run():
    for chain in chains_with(0, 200):
        for attempt in chain.attempts:
            planned = [fault for fault in attempt.faults if not fault.is_spare]
            assert not any(fault.kind in ENDING for fault in planned[:-1])
            assert all(fault.is_spare for fault in attempt.faults[len(planned) :])
            assert all((fault.moment.step or 0) <= STEPS for fault in attempt.faults)
        if not chain.is_moved:
            continue
        assert not chain.adapter
