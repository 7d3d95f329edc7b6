"""A window opens and closes once, at the steps that were asked for; what fails in it is a warning."""

import pytest
import torch

from finetune.config.sections.report import ProfileSection
from finetune.report import profile as profile_module
from finetune.report.events import Noted, Profiled, Warned
from finetune.report.profile import StepProfile
from tests.devices import ON_GPU


@pytest.fixture
def profile(tmp_path, diary):
    def make(**changes):
        section = ProfileSection(**{"start": 3, "steps": 2, **changes.pop("section", {})})
        reporter = diary()
        given = {"folder": tmp_path / "profile", "device": torch.device("cpu"), **changes}
        return StepProfile(section, reporter=reporter, **given), reporter.events

    return make


def train(profile, *, after=0, until=8):
    profile.begin(after)
    opened = []
    for step in range(after + 1, until + 1):
        with profile.phase("forward"):
            torch.ones(2).sum()
        opened += [step] if profile._clock is not None else []
        profile.end_step(step)
    profile.end_training(until)
    return opened


@pytest.mark.parametrize(
    ("after", "until", "opened"),
    [(0, 8, [3, 4]), (2, 8, [3, 4]), (3, 8, [4]), (0, 3, [3]), (4, 8, []), (0, 2, [])],
    ids=["whole", "resumed-before", "resumed-inside", "ended-inside", "resumed-after", "ended-before"],
)
def test_the_window_is_open_in_its_steps_alone(profile, after, until, opened, tmp_path):
    profile, events = profile()
    assert train(profile, after=after, until=until) == opened
    found = [event for event in events if isinstance(event, Profiled)]
    assert [(event.first_step, event.num_steps) for event in found] == ([(opened[0], len(opened))] if opened else [])
    for event in found:
        folder = tmp_path / "profile" / f"steps-{opened[0]:06}-{opened[-1]:06}"
        assert [path.name for path in folder.iterdir()] == ["rank-0.pt.trace.json.gz"]
        assert sum(event.seconds.values()) == pytest.approx(event.wall_seconds, rel=0.03, abs=2e-4)
        assert event.seconds["forward"] > 0
        assert event.seconds["communication"] == 0


def test_a_profiler_does_not_run_on_where_the_step_of_its_window_never_comes(profile, tmp_path):
    profile, events = profile()
    assert train(profile, until=2) == []
    assert profile._clock is None and not torch.autograd.profiler._is_profiler_enabled
    assert events == [] and not (tmp_path / "profile").exists()


def test_resuming_after_the_profile_window_is_logged(profile):
    profile, events = profile()
    train(profile, after=4)
    assert [event.message for event in events] == ["report.profile: steps 3 to 4 are over; nothing is profiled"]
    assert isinstance(events[0], Noted)


def test_a_trace_that_cannot_be_written_is_a_warning_and_the_table_stays(profile, tmp_path):
    (tmp_path / "file").write_text("")
    profile, events = profile(folder=tmp_path / "file" / "profile")
    train(profile)
    assert [type(event) for event in events] == [Warned, Profiled]
    assert "the trace could not be written" in events[0].message
    assert events[1].trace == ""


def test_a_profiler_that_cannot_be_started_is_a_warning(profile, monkeypatch):
    monkeypatch.setattr(profile_module, "TraceRecorder", lambda *_, **__: 1 / 0)
    profile, events = profile()
    assert train(profile) == []
    assert [type(event) for event in events] == [Warned]
    assert "ZeroDivisionError" in events[0].message


class TestOnAGpu:
    pytestmark = ON_GPU

    def test_phases_are_those_of_the_device_and_the_memory_is_a_snapshot(self, profile, tmp_path):
        profile, events = profile(device=torch.device("cuda"))
        weights = torch.ones(4096, 4096, device="cuda")
        profile.begin(0)
        for step in range(1, 9):
            with profile.phase("forward"):
                for _ in range(20):
                    weights @ weights
            profile.end_step(step)
        (event,) = [each for each in events if isinstance(each, Profiled)]
        assert sum(event.seconds.values()) == pytest.approx(event.wall_seconds, rel=0.03, abs=2e-4)
        assert event.seconds["forward"] > 0.9 * event.wall_seconds
        written = sorted(path.name for path in (tmp_path / "profile" / "steps-000003-000004").iterdir())
        assert written == ["rank-0.memory.pickle", "rank-0.pt.trace.json.gz"]
