"""Phases are timed without gaps; exposed communication is found in a trace, and the table shows all ranks."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from finetune.report import phases
from finetune.report.console import format_event
from finetune.report.events import Profiled
from finetune.report.phases import (
    PHASES,
    PhaseClock,
    PhaseSeconds,
    Traced,
    phase_seconds,
    read_trace,
    spread_over_ranks,
)
from tests.devices import ON_GPU

CPU = torch.device("cpu")


@pytest.fixture
def hours(monkeypatch):
    """Have the clock be an hour further each time."""
    numbers = itertools.count()
    monkeypatch.setattr(phases.time, "time_ns", lambda: next(numbers))


def test_time_counts_for_the_innermost_phase_and_leaves_no_gap(hours):
    clock = PhaseClock(CPU)
    with clock.phase("backward"), clock.phase("optimizer"):
        pass
    names = ("other", "backward", "optimizer", "backward", "other", "other")
    assert clock.stop() == list(enumerate(names, start=1))


def test_a_phase_that_fails_is_over(hours):
    clock = PhaseClock(CPU)
    with pytest.raises(ZeroDivisionError), clock.phase("forward"):
        1 / 0  # noqa: B018
    assert [name for _, name in clock.stop()] == ["other", "forward", "other", "other"]


def test_phases_and_steps_are_ranges_of_the_trace():
    with torch.profiler.profile() as profiler:
        clock = PhaseClock(CPU)
        clock.begin_step(7)
        with clock.phase("forward"):
            torch.ones(3).sum()
        clock.stop()
    names = {event.name for event in profiler.events()}
    assert {"ProfilerStep*", "finetune.forward"} <= names  # as torch writes the name of any step


class TestOnAGpu:
    pytestmark = ON_GPU

    def test_moments_are_those_of_the_device_in_order(self):
        clock = PhaseClock(torch.device("cuda"))
        with clock.phase("forward"):
            torch.ones(4096, 4096, device="cuda") @ torch.ones(4096, 4096, device="cuda")
        first, last, *_ = [moment for moment, _ in clock.stop()][1:]
        assert first < last


@dataclass
class Seen:
    """An event as Kineto has it."""

    what: str
    begins: int
    ends: int
    kind: str = "cpu_op"

    def name(self):
        return self.what

    def start_ns(self):
        return self.begins

    def end_ns(self):
        return self.ends

    def activity_type(self):
        return self.kind


def test_intervals_of_a_trace_are_those_of_collectives_kernels_and_operators():
    events = [
        Seen("aten::mm", 0, 40),
        Seen("gloo:all_reduce", 20, 80),
        Seen("c10d::allreduce_", 20, 22),
        Seen("autograd::engine::evaluate_function: MmBackward", 0, 100),
        Seen("finetune.forward", 0, 100, "user_annotation"),
        Seen("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 30, "kernel"),
        Seen("nccl:all_reduce", 0, 90, "gpu_user_annotation"),
        Seen("gemm", 20, 60, "kernel"),
    ]
    assert read_trace(events) == Traced([(20, 80), (10, 30)], [(20, 60)], [(0, 40)], [(20, 22)])


CHANGES = [(0, "forward"), (100, "backward"), (300, "other"), (310, "other")]


@pytest.mark.parametrize(
    ("traced", "exposed", "overlapped"),
    [
        (Traced([(150, 200), (180, 280)], operators=[(0, 150), (100, 200), (270, 280)]), 70, 60),
        (Traced([(150, 280)], operators=[(0, 280)], waiting=[(160, 170), (165, 230)]), 70, 60),  # waits while it runs
        (Traced([(150, 280)], kernels=[(0, 200), (270, 280)], operators=[(0, 310)], waiting=[(0, 9)]), 70, 60),
        (Traced([(-90, -10), (290, 990)], kernels=[(-50, 300)]), 10, 10),  # the window ends first
        (Traced(), 0, 0),
    ],
)
def test_exposed_communication_is_taken_out_of_its_phase_and_the_rest_stays(traced, exposed, overlapped):
    found = phase_seconds(CHANGES, traced, wall=310e-9)
    spent = {phase: round(seconds * 1e9) for phase, seconds in found.seconds.items()}
    assert (spent["communication"], round(found.overlapped * 1e9)) == (exposed, overlapped)
    assert spent["forward"] == 100 and spent["backward"] + spent["other"] == 210 - exposed
    assert tuple(found.seconds) == PHASES
    assert sum(found.seconds.values()) == pytest.approx(found.wall)


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
    assert "  overlapped         10.00    4.0%     10.00     10.00     10.00  rank 0" in lines
    assert "  busy              100.00   40.0%    100.00    150.00    200.00  rank 1" in lines
    assert "  wall              250.00  100.0%    250.00    250.00    250.00  rank 0" in lines
    assert lines[-1] == "  trace runs/a/rank-0.pt.trace.json.gz"
