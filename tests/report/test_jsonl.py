import dataclasses
import json
import math

import pytest

from finetune.report import events
from finetune.report.events import Evaluated, Event, StepSkipped, StepTaken
from finetune.report.history import read_events
from finetune.report.jsonl import JsonlReporter, event_fields

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


def test_a_resumed_run_appends_to_the_same_event_log(tmp_path, take_step):
    path = tmp_path / "events.jsonl"
    for step in (1, 2):
        reporter = JsonlReporter(path)
        reporter(take_step(step))
        reporter.close()
    assert [event["step"] for event in read_events(path)] == [1, 2]


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


def test_sample_ids_of_a_skipped_step_are_kept():
    assert event_fields(StepSkipped(3, "non-finite", (4, 9)), time=0.0)["sample_ids"] == [4, 9]


def test_an_event_name_is_the_class_name(take_step):
    assert event_fields(take_step(1), time=0.0)["event"] == StepTaken.__name__


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
