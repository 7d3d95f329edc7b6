"""The runs of a grid: every combination, checked together, and what they may not differ in from an earlier call."""

from pathlib import Path

import pytest

from finetune.commands.sweep.axes import grid_points, parse_axes
from finetune.commands.sweep.runs import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    STOPPED,
    WAITING,
    RecordedRun,
    SweepRun,
    check_runs,
    job_facts,
    make_run,
    outcome_of,
    own_overrides,
)
from finetune.config.load import load_config
from finetune.errors import ConfigError


def runs_of(*texts):
    axes = parse_axes(texts)
    return [make_run(point, axes, folder=Path("/sweep")) for point in grid_points(axes)]


def test_every_combination_is_a_run_and_fixed_keys_are_in_no_name():
    runs = runs_of("train.learning_rate=1e-4,2e-4", "train.steps=20", "run.seed=1,2,3")
    assert [run.name for run in runs][:2] == ["learning_rate=0.0001,seed=1", "learning_rate=0.0001,seed=2"]
    assert len(runs) == 6
    assert runs[5].overrides == ("train.learning_rate=0.0002", "train.steps=20", "run.seed=3")
    assert runs[0].folder == Path("/sweep/runs/learning_rate=0.0001,seed=1")


def test_problems_of_all_runs_are_reported_at_once_with_a_run_that_has_them(job):
    runs = runs_of("train.learning_rate=1e-4,-1,0", "train.stepz=1", "train.global_batch_size=8,9")
    with pytest.raises(ConfigError) as error:
        check_runs(job, runs, num_processes=1)
    text = str(error.value)
    assert "train.stepz: there is no such key" in text
    assert "`-1` is not allowed" in text and "(run learning_rate=-1,global_batch_size=8)" in text


def test_job_facts_leave_out_swept_keys_and_keys_that_may_differ(job):
    config = check_runs(job, runs_of("train.learning_rate=1e-4,2e-4"), num_processes=1).config
    facts = job_facts(config, swept=["train.learning_rate"])
    assert "train.learning_rate" not in facts and "train.microbatch_size" not in facts
    assert facts["train.steps"] == "10" and "rows.jsonl" in facts["data.train.path"]


def test_a_run_that_starts_from_a_checkpoint_resumes_from_its_own(job, tmp_path):
    run = SweepRun("a: b #c", {}, (), tmp_path)
    (job.parent / "other/checkpoints/step-000004").mkdir(parents=True)
    begins = load_config(job, ["checkpoint.resume=other/checkpoints/step-000004"])
    folder = f'run.folder="{tmp_path}/runs/a: b #c"'
    assert own_overrides(run, begins) == [folder]
    (run.folder / "checkpoints" / "step-000002").mkdir(parents=True)
    assert own_overrides(run, begins) == [folder, "checkpoint.resume=auto"]
    assert load_config(job, own_overrides(run, begins)).config.run.folder == str(run.folder)


def test_a_command_at_the_end_of_a_run_is_refused(job):
    with pytest.raises(ConfigError, match=r"run.on_end: it would run after each run of the sweep"):
        check_runs(job, runs_of("train.learning_rate=1e-4,2e-4", "run.on_end=reboot"), num_processes=1)


def status(state, *, error_type=None):
    error = {"type": error_type, "message": "it broke"} if error_type else None
    return {"state": state, "error": error, "reason": "signal SIGTERM", "step": 4, "num_steps": 8}


@pytest.mark.parametrize(
    ("written", "record", "state", "message"),
    [
        ({}, {}, WAITING, ""),
        (status("finished"), {}, FINISHED, ""),
        (status("stopped"), {}, STOPPED, "signal SIGTERM"),
        (status("failed", error_type="NonFiniteError"), {}, FAILED, "it broke"),
        (status("failed", error_type="LostContact"), {}, INTERRUPTED, "it broke"),
        (status("failed", error_type="DiskError"), {}, INTERRUPTED, "it broke"),
        (status("running"), {}, INTERRUPTED, "its process was killed"),
        ({}, {"error": "a bad key"}, FAILED, "a bad key"),
        (status("stopped"), {"error": "a bad key"}, FAILED, "a bad key"),  # the status is of an earlier start
        ({"state": 7, "error": 3, "step": -1}, {}, INTERRUPTED, "its process was killed"),
    ],
)
def test_the_outcome_follows_the_status_file_and_the_record(written, record, state, message):
    outcome = outcome_of(written, RecordedRun("a", **record))
    assert (outcome.state, outcome.message) == (state, message)
