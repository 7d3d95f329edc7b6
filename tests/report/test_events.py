"""Which lines of events.jsonl are events; report and compare get through all others."""

import dataclasses
import json
import math
import random
import shutil
from pathlib import Path

import pytest

from finetune.commands.compare.compare import compare_runs
from finetune.report import events
from finetune.report.events import Evaluated, Event, JsonlReporter, event_fields
from finetune.report.history import HistoryReader, parse_events, read_events
from finetune.report.page.page import report_page
from tests.report.page import events as made

STEP = {"event": "StepTaken", "time": 1.0, "step": 1, "loss": 2.5, "seconds": 0.1, "num_tokens": 10}


def line(**changes: object) -> bytes:
    return json.dumps({**STEP, **changes}).encode()


@pytest.mark.parametrize(
    "damaged",
    [
        line(step="nan"),
        line(step=-1),
        line(step=True),
        line(step=1.5),
        line(time=10**400),
        line(time="yesterday"),
        line(loss=10**400),
        line(loss=[1]),
        line(loss={}),
        line(metrics=1.5),
        line(metrics={"a": "b"}),
        line(samples_sha256="no digest"),
        line(memory_bytes=10**30),
        line(event=[]),
        line(event=None),
        json.dumps({"event": "RunStarted", "step": 0, "device_price": 1.5}).encode(),
        json.dumps({"event": "Evaluated", "step": 0, "metrics": ["loss"], "seconds": 1.0}).encode(),
        b'{"event": "StepTaken", "step": 1, "loss": NaN}',
        b'{"event": "StepTaken", "step": 1, "loss": 1e999}',
        b"[" * 100_000,
        b'{"event": "Noted", "step": 1, "message": "\xff\xfe"}',
        b'{"event": "StepTaken", "ste',
        b"1",
        b'"text"',
        b'{"event": "StepTaken"}, {"event": "StepTaken"}',
    ],
)
def test_a_damaged_line_is_counted_and_costs_only_itself(damaged: bytes):
    events, num_damaged = parse_events(b"\n".join([line(), damaged, line(step=2), b""]))
    assert [event["step"] for event in events] == [1, 2]
    assert num_damaged == 1


@pytest.mark.parametrize("loss", [2, "nan", "-inf", 0.5])
def test_every_written_line_parses_as_an_event(loss: object):
    for content in (line(loss=loss), b'{"event": "OfALaterVersion", "step": 3, "what": [1]}'):
        _, num_damaged = parse_events(content)
        assert num_damaged == 0


def _each_kind() -> list[dict]:
    by_name = {event["event"]: event for event in [*made.whole_run(), made.answered(3, "5")]}
    profile = {"seconds": {"forward": 1.0}, "wall_seconds": 1.5, "trace": "", "ranks": {"forward": {"min": 1.0}}}
    extra = [
        _event("StartedUp", seconds={"imports": 1.0}, cpu_seconds={}, memory_bytes={}),
        _event("StepSkipped", reason="non-finite", sample_ids=[1]),
        _event("CheckpointSaved", path="p", size_bytes=3, seconds=1.0, stall_seconds=0.1),
        _event("Warned", message="text"),
        _event("Profiled", first_step=3, num_steps=2, **profile),
    ]
    start = {"previous": {"reason": "killed", "step": 3}, "device_price": {"usd_per_hour": 1.0, "source": "list"}}
    started = {**by_name["RunStarted"], **start}
    return [started, *list(by_name.values())[1:], *extra, started]


def _event(name: str, **fields: object) -> dict:
    return {"event": name, "step": 4, "time": 5.0, **fields}


HOSTILE = (None, True, -1, 1.5, 10**400, "x", "NaN", [], {}, [[]], {"a": {}}, "\ud800")


def test_report_and_compare_get_through_lines_in_which_any_field_is_anything(tmp_path: Path):
    """Every event of a run with every field replaced: no line of them stops the page or the comparison."""
    run = tmp_path / "run"
    run.mkdir()
    healthy = [json.loads(json.dumps(event)) for event in _each_kind()]
    draw = random.Random(0)
    lines = [json.dumps(event) for event in healthy]
    for event in healthy:
        for name in event:
            lines.append(json.dumps({**event, name: draw.choice(HOSTILE)}))
            lines.append(json.dumps({key: value for key, value in event.items() if key != name}))
            for value in HOSTILE:
                lines.append(json.dumps({**event, name: value}))
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")
    reader = HistoryReader(run / "events.jsonl")
    reader.read_new()
    page = report_page(run, reader.history)
    assert reader.history.num_damaged_lines > len(healthy)
    assert f"{reader.history.num_damaged_lines:,} lines of events.jsonl (skipped)" in page
    shutil.copytree(run, tmp_path / "other")
    compare_runs([run, tmp_path / "other"], html=tmp_path / "page.html")
    assert "lines of events.jsonl (skipped)" in (tmp_path / "page.html").read_text()


EXAMPLES = {int: 3, float: 0.5, str: "text", tuple[str, ...]: ("a",), tuple[int, ...]: (7,), str | None: None}


def test_each_event_is_one_line_with_its_name_time_and_every_field(tmp_path, take_step):
    reporter = JsonlReporter(tmp_path / "events.jsonl", clock=lambda: 1_700_000_000.0)
    reporter(take_step(1))
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()  # flushed: the file is still open
    written = json.loads(line)
    assert list(written)[:3] == ["event", "time", "step"]
    assert written.pop("event") == "StepTaken" and written.pop("time") == 1_700_000_000.0
    assert written == dataclasses.asdict(take_step(1))
    reporter.close()


def test_every_kind_of_event_becomes_json():
    kinds = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)]
    assert len(kinds) >= 10
    for kind in kinds:
        fields = {field.name: EXAMPLES.get(field.type, {}) for field in dataclasses.fields(kind)}
        assert json.loads(json.dumps(event_fields(kind(**fields), time=0.0)))["event"] == kind.__name__


@pytest.mark.parametrize(("value", "text"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_non_finite_numbers_are_written_as_text(tmp_path, take_step, value, text):
    path = tmp_path / "events.jsonl"
    reporter = JsonlReporter(path)
    reporter(take_step(1, loss=value))
    reporter(Evaluated(1, metrics={"loss": value}, num_rows=2, seconds=0.1))
    reporter.close()
    step, evaluation = read_events(path)
    assert step["loss"] == text and evaluation["metrics"] == {"loss": text}
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()


def test_a_line_torn_by_a_killed_run_costs_only_itself(tmp_path, take_step):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "StepTaken", "step": 1}\n{"event": "StepTak')
    reporter = JsonlReporter(path)
    reporter(take_step(2))
    reporter.close()
    assert [event["step"] for event in read_events(path)] == [1, 2]


def test_the_event_log_is_not_created_before_the_first_event(tmp_path):
    JsonlReporter(tmp_path / "runs" / "events.jsonl").close()
    assert list(tmp_path.iterdir()) == []


def test_a_secret_in_the_config_is_not_written(tmp_path, started):
    reporter = JsonlReporter(tmp_path / "events.jsonl")
    reporter(started)
    reporter.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    assert "canary-secret" not in (tmp_path / "events.jsonl").read_text()
    assert event["config"]["train"]["learning_rate"] == 1e-3


def test_lines_logged_before_the_reporter_exists_come_first(tmp_path, started):
    reporter = JsonlReporter(tmp_path / "events.jsonl", notes=["4,000 rows", "warning: bf16 weights"])
    reporter(started)
    reporter.close()
    told = read_events(tmp_path / "events.jsonl")
    assert [(event["event"], event.get("message")) for event in told] == [
        ("Noted", "4,000 rows"),
        ("Warned", "bf16 weights"),
        ("RunStarted", None),
    ]
