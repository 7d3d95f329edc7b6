"""Events are read as they are written; of steps taken again after a kill, the last time counts."""

import json

from finetune.commands.sweep.history import TRAIN_LOSS, RunHistory


def line(name, step, **fields):
    return json.dumps({"event": name, "time": 0.0, "step": step, **fields}) + "\n"


def step(number, *, loss=1.0, seconds=2.0):
    return line("StepTaken", number, loss=loss, num_targets=10, num_tokens=100, seconds=seconds)


def test_new_events_are_read_and_an_incomplete_line_waits_for_its_end(tmp_path):
    path = tmp_path / "events.jsonl"
    history = RunHistory(path)
    history.read_new()  # there is no file yet
    text = line("RunStarted", 0) + step(1) + step(2, loss=3.0)
    path.write_text(text[:-20])
    history.read_new()
    assert history.steps == [1]
    path.write_text(text + line("Evaluated", 2, metrics={"loss": 2.5, "accuracy": "nan"}) + "not JSON\n")
    history.read_new()
    assert history.steps == [1, 2]
    assert history.metric("loss") == [(2, 2.5)] and history.metric("rouge") == []
    assert history.metric(TRAIN_LOSS) == [(2, 2.0)] and history.last_loss == 3.0
    assert (history.seconds, history.tokens_per_second) == (4.0, 50.0)


def test_steps_repeated_after_a_resume_are_counted_once(tmp_path):
    path = tmp_path / "events.jsonl"
    again = [line("RunStarted", 1), step(2, loss=7.0), line("Evaluated", 2, metrics={"loss": 7.5})]
    path.write_text(step(1) + step(2) + line("Evaluated", 2, metrics={"loss": 9.0}) + step(3) + "".join(again))
    history = RunHistory(path)
    history.read_new()
    assert history.steps == [1, 2] and history.seconds == 4.0
    assert history.metric("loss") == [(2, 7.5)]


def test_a_run_without_steps_has_no_speed_and_no_loss(tmp_path):
    history = RunHistory(tmp_path / "none.jsonl")
    assert history.tokens_per_second is None and history.metric(TRAIN_LOSS) == []
