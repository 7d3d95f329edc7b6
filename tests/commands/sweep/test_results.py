"""Runs are ranked by a metric whose direction is known; what has no value comes last."""

import json
from pathlib import Path

import pytest

from finetune.commands.sweep.results import (
    TRAIN_LOSS,
    Objective,
    SweepResult,
    best_of,
    choose_objective,
    closing_lines,
    history_so_far,
    measurements,
    rank_results,
    results_table,
)
from finetune.commands.sweep.runs import FAILED, FINISHED, STOPPED, RunOutcome, SweepRun
from finetune.config.load import load_config
from finetune.errors import UserError
from tests.refusals import refused

EVALUATED = ["data.validation.fraction=0.5", "evaluate={every_steps: 2}"]
LOSS, ACCURACY = Objective("loss", True), Objective("accuracy", False)
NAN = float("nan")


def result(name, final, *, state=FINISHED, message="", best=None):
    run = SweepRun(name, {"run.seed": name}, (), Path("/s"))
    return SweepResult(run, RunOutcome(state, message, 8, 8), final, best or final, 4)


RESULTS = [
    result("a", 2.0),
    result("b", NAN),
    result("c", 1.0, best=0.5),
    result("d", 0.1, state=STOPPED, message="signal SIGTERM"),
    result("e", None, state=FAILED, message="job.yaml has 1 problem\n  line 3"),
]


def test_results_are_ranked_with_the_best_finished_run_first():
    assert [result.run.name for result in rank_results(RESULTS, LOSS)] == ["c", "a", "b", "d", "e"]
    assert [result.run.name for result in rank_results(RESULTS, ACCURACY)] == ["a", "c", "b", "d", "e"]
    assert best_of(rank_results(RESULTS, LOSS)).run.name == "c"
    assert best_of(rank_results(RESULTS[3:], LOSS)) is None and best_of([]) is None


@pytest.mark.parametrize(
    ("written", "overrides", "objective"),
    [
        (None, [], Objective("train_loss", True)),
        (None, EVALUATED, LOSS),
        ("token_accuracy", EVALUATED, Objective("token_accuracy", False)),
        ("train_loss", EVALUATED, Objective("train_loss", True)),
        (
            None,
            [*EVALUATED, "train.early_stopping={metric: token_accuracy, goal: maximize}"],
            Objective("token_accuracy", False),
        ),
    ],
)
def test_the_default_metric_is_that_of_the_job(job, written, overrides, objective):
    assert choose_objective(written, load_config(job, overrides).config) == objective


@pytest.mark.parametrize(
    ("written", "overrides"), [("loss", []), ("rouge", EVALUATED), ("loss:maximize", EVALUATED), ("loss:up", EVALUATED)]
)
def test_an_unmeasured_metric_or_a_wrong_direction_is_refused(job, written, overrides):
    with refused(UserError):
        choose_objective(written, load_config(job, overrides).config)


def test_the_results_table_has_a_row_for_every_run():
    table = results_table(rank_results(RESULTS, LOSS), LOSS, swept=["run.seed", "train.steps"])
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["seed"] == ["c", "a", "b", "d", "e"] and set(columns["steps"]) == {"8/8"}
    assert columns["loss"] == ["1.0000", "2.0000", "nan", "0.1000", "-"]
    assert [str(cell) for cell in columns["status"]][3:] == [
        "stopped: signal SIGTERM",
        "failed: job.yaml has 1 problem",
    ]


def test_the_closing_lines_name_the_best_and_failed_runs_and_the_number_left():
    lines = "\n".join(closing_lines(rank_results(RESULTS, LOSS), LOSS))
    assert "best: c, loss 1.0000 after step 8" in lines
    assert "its model: /s/runs/c/final" in lines
    assert "--retry-failed" in lines and "1 of 5 runs are not finished" in lines


def write_events(folder, *events):
    (folder / "events.jsonl").write_text("".join(f"{json.dumps({'time': 0.0, **event})}\n" for event in events))


def step(number, *, loss=1.0):
    return {"event": "StepTaken", "step": number, "loss": loss, "num_targets": 10, "num_tokens": 100, "seconds": 2.0}


def evaluation(number, **metrics):
    return {"event": "Evaluated", "step": number, "num_rows": 4, "metrics": metrics, "seconds": 9.0}


def test_a_run_is_measured_by_its_evaluations_or_by_the_loss_of_its_last_steps(tmp_path):
    write_events(tmp_path, step(1), step(2, loss=3.0), evaluation(2, loss=2.5, accuracy="nan"))
    history = history_so_far(tmp_path)
    assert measurements(history, "loss") == [(2, 2.5)] and measurements(history, "rouge") == []
    assert measurements(history, TRAIN_LOSS) == [(2, 2.0)]


def test_steps_repeated_after_a_resume_are_counted_once(tmp_path):
    again = [{"event": "RunStarted", "step": 1}, step(2, loss=7.0), evaluation(2, loss=7.5)]
    write_events(tmp_path, step(1), step(2), evaluation(2, loss=9.0), step(3), *again)
    history = history_so_far(tmp_path)
    assert history.step == 2
    assert measurements(history, "loss") == [(2, 7.5)]


def test_a_run_without_readable_events_has_no_loss(tmp_path):
    history = history_so_far(tmp_path)
    assert measurements(history, TRAIN_LOSS) == []
    (tmp_path / "events.jsonl").mkdir()
    assert history_so_far(tmp_path).step == 0
