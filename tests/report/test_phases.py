"""Phases are timed without gaps; exposed communication is found in a trace, and the table shows all ranks."""

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from finetune.report.console import format_event
from finetune.report.events import Profiled
from finetune.report.phases import (
    PHASES,
    CudaMoments,
    Moments,
    PhaseClock,
    PhaseSeconds,
    PhaseSegment,
    Traced,
    TraceRecorder,
    difference,
    intersection,
    length,
    live_memory,
    phase_seconds,
    read_trace,
    spread_over_ranks,
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
        PhaseSegment("other", (1, 2)),
        PhaseSegment("backward", (2, 3)),
        PhaseSegment("optimizer", (3, 4)),
        PhaseSegment("backward", (4, 5)),
        PhaseSegment("other", (5, 6)),
    ]


def test_a_phase_that_fails_is_over():
    clock = PhaseClock(Hours(), has_nvtx=False)
    with pytest.raises(ZeroDivisionError), clock.phase("forward"):
        1 / 0  # noqa: B018
    clock.stop()
    assert [segment.phase for segment in clock.segments()] == ["other", "forward", "other"]


def test_phases_and_steps_are_ranges_of_the_trace():
    with torch.profiler.profile() as profiler:
        clock = PhaseClock(Moments(), has_nvtx=False)
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


@dataclass
class Seen:
    """An event as Kineto has it."""

    what: str
    begins: int
    ends: int
    kind: str = "cpu_op"
    size: int = 0

    def name(self):
        return self.what

    def start_ns(self):
        return self.begins

    def end_ns(self):
        return self.ends

    def activity_type(self):
        return self.kind

    def device_type(self):
        return "DeviceType.CPU"

    def nbytes(self):
        return self.size


def test_waits_inside_of_cpu_operators_do_not_count_as_computation():
    events = [
        Seen("gloo:all_reduce", 10, 50, "user_annotation"),
        Seen("aten::linalg_vector_norm", 0, 60),
        Seen("_c10d_functional::wait_tensor", 20, 40),
        Seen("autograd::engine::evaluate_function: X", 0, 90),
        Seen("RegisterPostBackwardFunctionBackward", 60, 90),
    ]
    assert read_trace(events) == Traced([(10, 50)], [(0, 20), (40, 60)])


def test_on_a_gpu_kernels_compute_and_nccls_communicate():
    events = [
        Seen("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 30, "kernel"),
        Seen("nccl:all_reduce", 0, 90, "gpu_user_annotation"),
        Seen("gemm", 20, 60, "kernel"),
        Seen("aten::mm", 0, 90),
    ]
    assert read_trace(events) == Traced([(10, 30)], [(20, 60)])


def test_exposed_communication_is_taken_out_of_its_phase_and_the_rest_stays():
    segments = [
        PhaseSegment("forward", (0, 100)),
        PhaseSegment("backward", (100, 300)),
        PhaseSegment("other", (300, 310)),
    ]
    traced = Traced(collectives=[(150, 280)], computing=[(0, 200), (270, 280)])
    found = phase_seconds(segments, traced, wall=310e-9)
    spent = {phase: round(seconds * 1e9) for phase, seconds in found.seconds.items() if seconds}
    assert spent == {"forward": 100, "backward": 130, "communication": 70, "other": 10}
    assert round(found.overlapped * 1e9) == 60
    assert tuple(found.seconds) == PHASES
    assert sum(found.seconds.values()) == pytest.approx(found.wall)


def test_live_bytes_have_a_peak_in_each_phase():
    segments = [
        PhaseSegment("forward", (0, 10)),
        PhaseSegment("backward", (10, 20)),
        PhaseSegment("optimizer", (20, 30)),
    ]
    found = live_memory(segments, [(2, 100), (5, 50), (12, 30), (14, -150), (25, -30)])
    assert found["peak_bytes"] == 180
    assert found["peak_bytes_by_phase"] == {"forward": 150, "backward": 180, "optimizer": 30}
    assert [row[1] for row in found["live_bytes"]] == [100, 150, 180, 30, 0]


def test_a_real_trace_on_a_cpu_shows_operators_and_allocations(tmp_path):
    recorder = TraceRecorder(has_cuda=False, memory=True, stacks=False)
    kept = torch.ones(1000) * 2
    recorder.stop()
    traced = recorder.read()
    assert traced.computing
    assert traced.collectives == []
    assert max(size for _, size in traced.allocations) >= kept.nbytes
    recorder.write(tmp_path / "new" / "rank-0.pt.trace.json.gz")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rank-0.pt.trace.json.gz"]


def of_rank(**seconds):
    spent = {**dict.fromkeys(PHASES, 0.0), **seconds}
    return PhaseSeconds(spent, wall=sum(spent.values()), overlapped=0.02)


def test_the_table_shows_a_step_and_names_the_rank_for_which_the_others_wait():
    ranks = [of_rank(forward=0.2, communication=0.3), of_rank(forward=0.4, communication=0.1)]
    event = Profiled(
        step=4,
        first_step=3,
        num_steps=2,
        seconds=ranks[0].seconds,
        wall_seconds=ranks[0].wall,
        trace="runs/a/rank-0.pt.trace.json.gz",
        overlapped_seconds=0.02,
        ranks=spread_over_ranks(ranks),
    )
    lines = format_event(event)
    assert lines[0] == "profile of steps 3 to 4, ms per step (rank 0; then all ranks)"
    assert "  forward           100.00   40.0%    100.00    150.00    200.00  rank 1" in lines
    assert "  communication     150.00   60.0%     50.00    100.00    150.00  rank 0" in lines
    assert "  wall              250.00  100.0%    250.00    250.00    250.00  rank 0" in lines
    assert "  communication: exposed; another 10.00 ms overlaps with computation" in lines
    assert "  slowest: rank 1, 200.00 ms a step outside communication, median 150.00" in lines
    assert lines[-1] == "  trace runs/a/rank-0.pt.trace.json.gz"
