"""What a run has measured last is measured again afterwards: from its checkpoint, its `final/`, or any folder."""

import json
import shutil

import pytest

from finetune.commands.evaluate import evaluate
from finetune.commands.export import export
from finetune.errors import ConfigError, ModelError, UserError
from finetune.report.history import read_events


def told(folder):
    """Return the metrics of each evaluation of the run, by step."""
    events = read_events(folder / "events.jsonl")
    found = {event["step"]: event["metrics"] for event in events if event["event"] == "Evaluated"}
    assert found
    return found


@pytest.fixture
def measured(tmp_path):
    """Return a function that measures and returns what was written."""

    def measure(source, *, step=None, config=None, overrides=()):
        assert evaluate(source, step=step, config=config, overrides=overrides, json=tmp_path / "metrics.json") == 0
        return json.loads((tmp_path / "metrics.json").read_text())

    return measure


@pytest.mark.parametrize("name", ["full", "lora", "merged"])
def test_the_last_checkpoint_gives_the_last_evaluation_again(trained, measured, name, capsys):
    run = trained(name)
    found = measured(run)
    assert found["metrics"] == told(run)[4]
    assert (found["step"], found["rows"]) == (4, 7)
    assert f"loss            {found['metrics']['loss']:.6g}" in capsys.readouterr().out


def test_an_earlier_step_gives_the_earlier_one(trained, measured):
    run = trained("full")
    assert measured(run, step=2)["metrics"] == told(run)[2] != told(run)[4]
    assert measured(run / "checkpoints" / "step-000002")["metrics"] == told(run)[2]


@pytest.mark.parametrize("name", ["full", "lora", "merged"])
def test_final_is_measured_by_the_run_s_own_job(trained, measured, name):
    run = trained(name)
    assert measured(run / "final")["metrics"] == pytest.approx(told(run)[4], rel=1e-5)


def test_a_folder_elsewhere_is_measured_by_the_job_that_is_named(trained, measured, job, tmp_path):
    run = trained("lora")
    export(run, step=None, to=tmp_path / "model", dtype=None, merge=True, push_to_hub=None)
    with pytest.raises(UserError, match=r"so there is no job to evaluate with\. Add --config"):
        measured(tmp_path / "model")
    assert measured(tmp_path / "model", config=job)["metrics"] == pytest.approx(told(run)[4], rel=1e-5)


def test_other_rows_and_settings_are_laid_over_the_run_s_job(trained, measured, tmp_path, monkeypatch, job):
    shutil.copy(job.parent / "held_out.jsonl", tmp_path / "rows.jsonl")
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()[:3]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    run = trained("full")
    rows = ["data.validation.path=rows.jsonl"]
    small, large = (measured(run, overrides=[*rows, f"evaluate.microbatch_size={size}"]) for size in (1, 3))
    assert small["rows"] == large["rows"] == 3
    assert small["metrics"] == pytest.approx(large["metrics"], rel=1e-6)
    assert small["metrics"]["loss"] != told(run)[4]["loss"]


def test_evaluate_generates_answers_if_the_job_requests_them(trained, measured):
    found = measured(trained("full"), overrides=["evaluate.generate={num_samples: 2, max_new_tokens: 3}"])
    assert 0.0 <= found["metrics"]["exact_match"] <= 1.0


def test_a_folder_that_cannot_be_evaluated_is_rejected(trained, measured, job, tmp_path):
    run = trained("full")
    with pytest.raises(UserError, match=r"the job has no validation data"):
        measured(run, overrides=["data.validation=null"])
    with pytest.raises(UserError, match=r"--set: train\.steps"):
        measured(run, overrides=["train.steps=ten"])
    with pytest.raises(ConfigError, match="`=` is missing"):
        measured(run, overrides=["steps"])
    with pytest.raises(UserError, match="has the task `pretrain`, and the run was trained on `sft`"):
        measured(run, config=job, overrides=["task.name=pretrain", "data.chat_template=null"])
    with pytest.raises(UserError, match="has no checkpoints"):
        measured(run / "final", step=2)
    with pytest.raises(ModelError, match="does not exist"):
        measured(tmp_path / "nothing")
