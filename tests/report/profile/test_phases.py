import random
from itertools import pairwise

import pytest
import torch

from finetune.report.profile.phases import (
    CudaMoments,
    HostMoments,
    PhaseClock,
    Segment,
    difference,
    intersection,
    length,
    union,
)
from tests.devices import ON_GPU


class Hours:
    """A clock that is an hour further each time."""

    def __init__(self):
        self.now = 0

    def take(self):
        self.now += 1
        return self.now

    def read(self, moment):
        return moment


def test_time_counts_for_the_innermost_phase_and_leaves_no_gap():
    clock = PhaseClock(Hours(), has_nvtx=False)
    with clock.phase("backward"), clock.phase("optimizer"):
        pass
    clock.stop()
    assert clock.segments() == [
        Segment("other", (1, 2)),
        Segment("backward", (2, 3)),
        Segment("optimizer", (3, 4)),
        Segment("backward", (4, 5)),
        Segment("other", (5, 6)),
    ]


def test_a_phase_that_fails_is_over():
    clock = PhaseClock(Hours(), has_nvtx=False)
    with pytest.raises(ZeroDivisionError), clock.phase("forward"):
        1 / 0  # noqa: B018
    clock.stop()
    assert [segment.phase for segment in clock.segments()] == ["other", "forward", "other"]


def test_phases_and_steps_are_ranges_of_the_trace():
    with torch.profiler.profile() as profiler:
        clock = PhaseClock(HostMoments(), has_nvtx=False)
        clock.begin_step(7)
        with clock.phase("forward"):
            torch.ones(3).sum()
        clock.stop()
    names = {event.name for event in profiler.events()}
    assert {"ProfilerStep*", "finetune.forward"} <= names  # as torch writes the name of any step


class TestOnAGpu:
    pytestmark = ON_GPU

    def test_moments_are_taken_without_waiting_and_read_in_order(self):
        moments = CudaMoments()
        first = moments.take()
        torch.ones(4096, 4096, device="cuda") @ torch.ones(4096, 4096, device="cuda")
        last = moments.take()
        assert moments.read(first) < moments.read(last)


def moments(intervals):
    return {moment for start, end in intervals for moment in range(start, end)}


def test_sets_of_moments_are_those_of_the_moments_one_by_one():
    chance = random.Random(0)
    for _ in range(300):
        one, other = ([(start := chance.randrange(40), start + chance.randrange(9)) for _ in range(6)] for _ in "ab")
        merged, others = union(one), union(other)
        assert moments(merged) == moments(one)
        assert length(merged) == len(moments(one))
        assert all(end < start for (_, end), (start, _) in pairwise(merged))
        assert moments(intersection(merged, others)) == moments(one) & moments(other)
        assert moments(difference(merged, others)) == moments(one) - moments(other)
        assert length(difference(merged, others)) == len(moments(one) - moments(other))


def test_empty_intervals_cover_no_time():
    assert union([(3, 3)]) == difference([], [(1, 2)]) == intersection([(1, 2)], []) == []
