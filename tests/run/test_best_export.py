"""`final/` is the model of the last step or the best one, as `export.checkpoint` says, and the run's end names both."""

import pytest
import torch
from safetensors.torch import load_file

from finetune.api.commands import export
from finetune.api.training import train
from finetune.config.load import load_config
from finetune.errors import ConfigError
from finetune.report.history import read_events
from finetune.run.state.finished import read_final_record
from tests.refusals import refused
from tests.small_job import write_job

WORSE = {  # the first steps at 5e-2 help, later ones at that rate harm
    "train.learning_rate": 0.5,
    "train.schedule": {"name": "constant"},
    "checkpoint.every_steps": 1,
    "evaluate.every_steps": 1,
    "evaluate.at_start": True,
    "train.steps": 12,
}
STOPPING, KEPT = {"train.early_stopping": {"patience": 2}}, {"checkpoint.keep_best": {}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("best")
    write_job(made)
    return made


def trained(folder, name, **overrides):
    run = folder / name
    overrides = {**WORSE, **overrides, "run.folder": str(run)}
    return run, train(str(folder / "job.yaml"), overrides=overrides), overrides


def lines(run):
    return [event["message"] for event in read_events(run / "events.jsonl") if event["event"] == "Noted"]


def test_the_best_checkpoint_is_exported_on_request_and_the_end_names_both_steps(folder):
    run, result, overrides = trained(folder, "best", **STOPPING, **KEPT, **{"export.checkpoint": "best"})
    losses = {e["step"]: e["metrics"]["loss"] for e in read_events(run / "events.jsonl") if e["event"] == "Evaluated"}
    best = min((step for step in losses if step), key=losses.get)
    assert result.reason == "early stopping"
    assert 0 < best < result.num_steps
    exported = load_file(run / "final" / "model.safetensors")
    export(run, step=best, to=run / "by-hand")
    by_hand = load_file(run / "by-hand" / "model.safetensors")
    assert exported.keys() == by_hand.keys()
    assert all(torch.equal(exported[name], by_hand[name]) for name in exported)
    record = read_final_record(run)
    assert (record["step"], record["last_step"]) == (best, result.num_steps)
    line = next(text for text in lines(run) if "best checkpoint" in text)
    assert f"step {best}, with loss {losses[best]:.4g}" in line
    assert f"the last is of step {result.num_steps}" in line
    written = (run / "final" / "model.safetensors").stat().st_mtime_ns
    assert train(str(folder / "job.yaml"), overrides=overrides).num_steps == result.num_steps
    assert (run / "final" / "model.safetensors").stat().st_mtime_ns == written  # nothing was left to do


def test_a_last_checkpoint_that_is_not_the_best_is_named_with_the_command_for_the_best(folder):
    run, result, _ = trained(folder, "last", **STOPPING, **KEPT)
    (line,) = [text for text in lines(run) if "finetune export" in text]
    assert f"final is of step {result.num_steps};" in line
    step = int(line.rpartition("--step ")[2])
    assert (run / "checkpoints" / f"step-{step:06}" / "manifest.json").is_file()
    assert read_final_record(run)["step"] == result.num_steps


def test_a_best_checkpoint_is_only_exported_where_one_is_kept(folder):
    with refused(ConfigError) as error:
        load_config(folder / "job.yaml", ["export.checkpoint=best"])
    assert [problem.key for problem in error.value.problems] == ["export.checkpoint"]
