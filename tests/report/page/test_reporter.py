"""The page is there while the run goes on and after whatever end, and costs the run next to nothing."""

import json
import threading
import time
from pathlib import Path

import pytest

from finetune.report.events import RunEnded, RunStarted, StepTaken, Warned
from finetune.report.jsonl import JsonlReporter
from finetune.report.page import reporter as page_reporter
from finetune.report.page.reporter import PageReporter
from finetune.report.reporter import FanOut

START = RunStarted(0, 100, "single on 1 process", ("batch: 64 = 1 process x 64",), {})
END = RunEnded(3, "finished", 3.0, {}, "final")


def reporters(folder: Path, **settings) -> FanOut:
    path = folder / "events.jsonl"
    return FanOut([JsonlReporter(path), PageReporter(path, **settings)])


def steps_in(folder: Path) -> int:
    page = (folder / "report.html").read_text()
    return int(page.partition("<small>steps</small><b>")[2].partition("<")[0].replace(",", ""))


def test_the_last_page_has_all_steps(tmp_path: Path, take_step):
    reporter = reporters(tmp_path)
    for event in (START, *(take_step(step) for step in (1, 2, 3)), END):
        reporter(event)
    reporter.close()
    assert steps_in(tmp_path) == 3
    assert '<span class="state finished">' in (tmp_path / "report.html").read_text()


def test_a_resumed_run_continues_the_page(tmp_path: Path, take_step):
    first = reporters(tmp_path)
    for event in (START, *(take_step(step) for step in (1, 2, 3))):
        first(event)
    first.close()  # as after a failure: nothing has said that the run is over
    (tmp_path / "status.json").write_text(
        json.dumps({"state": "failed", "error": {"rank": 0, "type": "OSError", "message": "disk full"}})
    )
    second = reporters(tmp_path)
    second(RunStarted(2, 100, "single on 1 process", (), {}))
    second(take_step(3))
    second(take_step(4))
    second.close()
    assert steps_in(tmp_path) == 4
    assert "rank 0: OSError: disk full" in (tmp_path / "report.html").read_text()


def test_a_report_that_fails_is_a_warning(tmp_path: Path, take_step, monkeypatch: pytest.MonkeyPatch):
    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr(page_reporter, "write_report", fail)
    seen = []
    reporter = FanOut([seen.append, PageReporter(tmp_path / "events.jsonl")])
    reporter(START)
    for thread in [each for each in threading.enumerate() if each.name == "report.html"]:
        thread.join()
    reporter(take_step(1))
    reporter(take_step(2))
    warnings = [event.message for event in seen if isinstance(event, Warned)]
    assert warnings == ["PageReporter failed and is disabled: OSError: no room"]
    assert [event.step for event in seen if isinstance(event, StepTaken)] == [1, 2]


def test_pages_are_rare(tmp_path: Path, take_step, monkeypatch: pytest.MonkeyPatch):
    written = []
    monkeypatch.setattr(page_reporter, "write_report", lambda *_: written.append(time.monotonic()))
    reporter = reporters(tmp_path, min_seconds=3600.0)
    reporter(START)
    for step in range(1, 2000):
        reporter(take_step(step))
    reporter.close()
    assert 1 <= len(written) <= 2  # at the start, and at the end


def test_a_run_without_events_has_no_page(tmp_path: Path):
    reporters(tmp_path).close()
    assert list(tmp_path.iterdir()) == []
