"""The gate of every task whose rows have losses, and of the losses that it refuses; replays of the same runs."""

import weakref

import pytest

from finetune.commands.gate import comparison
from finetune.commands.gate.rows import measure_rows
from finetune.commands.verify.replay import run_replay
from finetune.errors import UserError
from finetune.report.history import read_events
from finetune.run.in_process import isolated_run
from tests.commands.gate.conftest import Gate
from tests.scenarios.trained import train_here
from tests.task_cases import CASES
from tests.task_cases.runs import prepare

pytestmark = pytest.mark.full

SHARES = {
    "text_classification": "accuracy",
    "regression": "",
    "token_classification": "accuracy",
    "seq2seq": "exact match",
    "sft": "exact match",
    "pretrain": "",
    "dpo": "chosen answer more likely",
    "reward": "chosen answer scored higher",
    "reranking": "positive ranked first",
    "embedding": "",
}
"""The name of the share of right rows of each case of tests/task_cases; empty where no row is right or wrong."""

NEW_HEADS = {"text_classification", "regression", "token_classification", "reward", "reranking"}


@pytest.fixture
def train(tmp_path):
    """Return a function that trains a case of that name and returns the folder of the run."""

    def run(name):
        case = next(case for case in CASES if case.name == name)
        prepare([case], tmp_path)
        folder = tmp_path / name / "runs" / "first"
        overrides = (f"run.folder={folder}", "run.record_layers=true", "checkpoint.every_steps=2")
        train_here(tmp_path / name / "job.yaml", *overrides, *next(iter(case.variants.values())))
        return folder

    return run


@pytest.mark.parametrize("name", SHARES)
def test_the_losses_of_the_rows_are_those_of_the_last_evaluation(train, gate: Gate, name, capsys):
    run = train(name)
    evaluated = [event for event in read_events(run / "events.jsonl") if event["event"] == "Evaluated"]
    _, found = gate(run, general=None)
    assert found["rows"]
    assert found["loss"]["tuned"] == pytest.approx(evaluated[-1]["metrics"]["loss"], rel=1e-5)
    assert found["loss"]["baseline"] != pytest.approx(found["loss"]["tuned"], rel=1e-4)
    assert found["share_name"] == SHARES[name] and (found["share"] is not None) is bool(SHARES[name])
    assert (found["forgetting"] is not None) is (name == "dpo"), "the other models begin with random weights"
    assert found["may_have_new_head"] is (name in NEW_HEADS)
    assert ("a new head of random weights" in capsys.readouterr().out) is (name in NEW_HEADS)
    for start in (None, 2):
        with isolated_run():
            code = run_replay(run, num_steps=3, start=start, layers=start is None)
        assert code == 0, capsys.readouterr().out
    assert "outputs of 0 of" not in capsys.readouterr().out


def test_the_reference_of_pairs_is_the_model_that_the_job_starts_from(train, gate: Gate):
    run = train("dpo")
    for source in (run, run / "final"):  # the full model in final/ is not its own reference
        assert gate(source, general=None)[1]["loss"]["baseline"] == pytest.approx(0.693147, abs=1e-5)


def test_an_exported_classifier_is_no_different_from_its_run_and_one_model_at_a_time_is_in_memory(
    train, gate: Gate, monkeypatch
):
    measured, num_alive = [], []

    def measure(model, task, rows):
        num_alive.append(sum(earlier() is not None for earlier in measured))
        measured.append(weakref.ref(model))
        return measure_rows(model, task, rows)

    monkeypatch.setattr(comparison, "measure_rows", measure)
    run = train("text_classification")
    _, found = gate(run / "final", against=run, general=None)
    assert (found["verdict"], found["seen_differently"], found["may_have_new_head"]) == ("no difference", [], False)
    assert num_alive == [0, 0]
    with pytest.raises(UserError, match=r"--general: models of task `text_classification`"):
        gate(run)


@pytest.mark.parametrize("name", ["kto", "scored_pairs"])
def test_losses_that_compare_rows_have_none_of_a_row(train, gate: Gate, name):
    with pytest.raises(UserError, match=r"`kto`, `cosent`"):
        gate(train(name), general=None)


def test_a_task_without_losses_of_rows_is_refused_by_name(train, gate: Gate):
    with pytest.raises(UserError, match=r"task `masked_lm` has no loss of a single row"):
        gate(train("masked_lm"), general=None)
