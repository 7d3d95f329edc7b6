"""Communication is found in a trace, and each phase gives up the part of it that nothing hides."""

from dataclasses import dataclass

import pytest
import torch

from finetune.report.profile.phases import PHASES, Segment
from finetune.report.profile.trace import Traced, TraceRecorder, live_memory, phase_seconds, read_trace


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
    segments = [Segment("forward", (0, 100)), Segment("backward", (100, 300)), Segment("other", (300, 310))]
    traced = Traced(collectives=[(150, 280)], computing=[(0, 200), (270, 280)])
    found = phase_seconds(segments, traced, wall=310e-9)
    spent = {phase: round(seconds * 1e9) for phase, seconds in found.seconds.items() if seconds}
    assert spent == {"forward": 100, "backward": 130, "communication": 70, "other": 10}
    assert round(found.overlapped * 1e9) == 60
    assert tuple(found.seconds) == PHASES
    assert sum(found.seconds.values()) == pytest.approx(found.wall)


def test_live_bytes_have_a_peak_in_each_phase():
    segments = [Segment("forward", (0, 10)), Segment("backward", (10, 20)), Segment("optimizer", (20, 30))]
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
