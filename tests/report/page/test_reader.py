"""events.jsonl is read once, whatever is at its end."""

import json
from pathlib import Path

from finetune.report.page.reader import EventsReader
from tests.report.page.events import started, taken, write_run


def test_only_new_lines_are_read(tmp_path: Path):
    path = write_run(tmp_path, [started(), taken(1, 1.0)]) / "events.jsonl"
    reader = EventsReader(path)
    reader.read_new()
    with path.open("a") as file:
        file.write(json.dumps(taken(2, 1.0)) + "\n" + json.dumps(taken(3, 1.0))[:40])
    reader.read_new()
    assert reader.history.step == 2
    with path.open("a") as file:
        file.write(json.dumps(taken(3, 1.0))[40:] + "\n")
    reader.read_new()
    assert reader.history.step == 3
    assert reader.history.tokens == 1200


def test_damaged_lines_are_left_out(tmp_path: Path):
    path = write_run(tmp_path, [started()]) / "events.jsonl"
    with path.open("ab") as file:
        file.write(b'{"event": "StepTaken", "st\n\xff\xfe\n[1]\n7\n' + json.dumps(taken(1, 1.0)).encode() + b"\n")
    reader = EventsReader(path)
    reader.read_new()
    assert reader.history.step == 1


def test_a_file_that_was_replaced_is_read_from_its_start(tmp_path: Path):
    path = write_run(tmp_path, [started(), *(taken(step, 1.0) for step in range(1, 9))]) / "events.jsonl"
    reader = EventsReader(path)
    reader.read_new()
    write_run(tmp_path, [started(), taken(1, 1.0)])
    reader.read_new()
    assert reader.history.step == 1


def test_a_run_without_events_has_an_empty_history(tmp_path: Path):
    reader = EventsReader(tmp_path / "events.jsonl")
    reader.read_new()
    assert reader.history.step == 0
