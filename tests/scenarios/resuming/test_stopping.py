"""A run that is told to stop on one rank stops on all, saved, and goes on elsewhere."""

import json
import os
import re
import signal

import pytest

TERMINATE = "tests.scenarios.resuming.metrics_that_signal:terminate"
SIGNAL_AT_STEP_2 = [
    "evaluate.every_steps=2",
    f"evaluate.generate={{num_samples: 3, max_new_tokens: 2, metrics: ['{TERMINATE}']}}",
    "train.steps=20",
]

NO_EVALUATION = ["evaluate=null", "data.validation=null"]
LONG = [*NO_EVALUATION, "train.steps=50000", "checkpoint.every_steps=40000", "report.log_every_steps=1000"]


@pytest.mark.full
@pytest.mark.distributed
def test_sigterm_on_one_rank_saves_on_all_and_another_strategy_resumes(launch):
    stopped = launch("ddp", name="signaled", overrides=SIGNAL_AT_STEP_2)
    assert stopped.code != 0  # the launcher says 1 for 143
    assert "signal SIGTERM" in stopped.output
    assert len(stopped.losses()) == 2  # the signal came after the second step: no third is begun
    assert [path.name for path in (stopped.folder / "checkpoints").glob("step-*")] == ["step-000002"]
    assert not (stopped.folder / "final").exists()
    calm = [*SIGNAL_AT_STEP_2[:1], SIGNAL_AT_STEP_2[2]]
    straight = launch(None, name="not-signaled", overrides=calm)
    went_on = launch("zero3", name="signaled", overrides=calm)
    assert went_on.code == 0, went_on.output
    assert went_on.losses() == pytest.approx(straight.losses(), rel=1e-4)
    assert (went_on.folder / "final" / "model.safetensors").exists()


@pytest.mark.distributed
def test_sigterm_to_the_launcher_saves_on_all_ranks_and_the_same_command_continues(begin, launch):
    """Before it, SIGUSR1 to one rank saves and goes on; processes that load data do not fall to the signal."""
    loaded = [*LONG, "data.num_workers=1", "data.prefetch_factor=2"]
    run = begin("ddp", name="launcher-told", overrides=loaded)
    run.until(lambda: run.status().get("step", 0) > 0)
    pids = run.pids()
    os.kill(pids[1], signal.SIGUSR1)
    run.until(lambda: run.checkpoints())
    saved, gone_on = run.checkpoints(), run.status()["step"]
    run.until(lambda: run.status()["step"] > gone_on)
    run.process.send_signal(signal.SIGTERM)
    assert run.until_ended() != 0
    run.until_gone(pids)
    status = run.status()
    assert (status["state"], status["reason"], status["exit_code"]) == ("stopped", "signal SIGTERM", 143)
    assert len(saved) == 1
    assert run.checkpoints() == [*saved, f"step-{status['step']:06d}"]
    assert status["checkpoint"] == str(run.folder / "checkpoints" / run.checkpoints()[1])
    assert status["error"] is None
    assert " exits because " not in run.output
    (
        run.folder / "STOP"
    ).touch()  # found at once by the next launch: it ends before its first step, and obeys only once
    ended = launch("ddp", name="launcher-told", overrides=LONG)
    assert ended.code == 0, ended.output
    assert (ended.status()["state"], ended.status()["reason"]) == ("stopped", "STOP file")
    assert ended.status()["step"] == status["step"]
    assert not (run.folder / "STOP").exists()


@pytest.mark.distributed
def test_workers_whose_launcher_is_killed_save_and_end(begin):
    run = begin("zero3", name="launcher-killed", overrides=LONG)
    run.until(lambda: run.status().get("step", 0) > 0)
    pids = run.pids()
    run.process.kill()
    run.until_gone(pids)
    status = run.status()
    assert (status["state"], status["reason"]) == ("stopped", "signal SIGTERM")
    assert run.checkpoints() == [f"step-{status['step']:06d}"]


@pytest.mark.full
@pytest.mark.distributed
def test_sigterm_during_a_save_lets_it_end_and_a_nan_on_one_rank_is_left_out_on_all(launch):
    keeps_all = "checkpoint.keep_last=5"  # on a slow disk the first is still being written when the next is due
    saves = [keeps_all, "checkpoint.every_steps=4", "train.nonfinite.action=skip"]
    overrides = [*NO_EVALUATION, "train.steps=20", *saves]
    faults = "save.written step=4 rank=1 do=terminate; forward step=2 rank=1 do=nan"
    run = launch("ddp", name="saving", overrides=overrides, faults=faults)
    status = run.status()
    assert (status["state"], status["reason"]) == ("stopped", "signal SIGTERM")
    assert run.checkpoints()[0] == "step-000004"
    assert run.checkpoints()[-1] == f"step-{status['step']:06d}"
    (skipped,) = run.events("StepSkipped")
    assert (skipped["step"], skipped["reason"]) == (3, "non-finite")
    assert len(skipped["sample_ids"]) == 4  # those of the one rank


@pytest.mark.full
@pytest.mark.distributed
def test_a_stop_that_is_asked_for_during_the_start_ends_the_run_at_once(begin):
    early = begin(None, name="early-stop", overrides=NO_EVALUATION)
    early.until(lambda: early.status().get("state") == "starting")
    early.process.send_signal(signal.SIGTERM)
    assert early.until_ended() == 143
    assert (early.status()["state"], early.status()["reason"]) == ("stopped", "signal SIGTERM")
    assert early.checkpoints() == []


@pytest.mark.distributed
def test_a_finished_run_is_not_trained_again_and_rejects_another_job(launch):
    first = launch(None, name="finished")
    weights = first.folder / "final" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    again = launch("ddp", name="finished")
    assert first.code == again.code == 0, again.output
    assert again.losses() == first.losses()
    assert "nothing to do: finished at step 8" in again.output
    assert (again.status()["state"], again.status()["step"]) == ("finished", 8)
    assert weights.stat().st_mtime_ns == written
    weights.write_bytes(weights.read_bytes()[:-1])  # no longer whole: it is exported again, from the checkpoint
    mended = launch(None, name="finished")
    assert mended.code == 0, mended.output
    assert mended.losses() == first.losses()
    assert weights.stat().st_mtime_ns > written
    other = launch(None, name="finished", overrides=["train.learning_rate=2e-2"])
    assert other.code == 2
    assert "train.learning_rate" in other.output


@pytest.mark.distributed
def test_config_and_environment_are_recorded_in_the_run_folder_which_another_job_is_refused(launch):
    run = launch(None, name="described", overrides=["train.stop_after_steps=1"])
    resolved = (run.folder / "resolved.yaml").read_text()
    assert re.search(r"learning_rate: 0\.01 +# job\.yaml line 21$", resolved, re.MULTILINE), resolved
    assert re.search(r"stop_after_steps: 1 +# --set", resolved), resolved
    assert (run.folder / "config.yaml").read_text().startswith("\nrun:")
    facts = json.loads((run.folder / "environment.json").read_text())
    assert facts["packages"]["torch"]
    other = launch(None, name="described", overrides=["run.seed=8"])
    assert other.code == 2
    assert "run.seed" in other.output and "Traceback" not in other.output


@pytest.mark.full
@pytest.mark.distributed
def test_early_stopping_exports_and_does_not_start_again(launch):
    hopeless = [
        "evaluate.every_steps=1",
        "train.early_stopping={metric: loss, patience: 2, min_delta: 100.0}",  # no evaluation is ever better
        "report.log_every_steps=50",
    ]
    first = launch(None, name="early", overrides=hopeless)
    again = launch(None, name="early", overrides=hopeless)
    assert first.code == again.code == 0, first.output + again.output
    assert len(first.losses()) == len(again.losses()) == 3  # the first evaluation is the best, two are not better
    assert "early stopping at step 3" in again.output
    assert (first.folder / "final" / "model.safetensors").exists()


@pytest.mark.distributed
def test_every_step_before_a_nan_is_in_the_event_log(launch):
    run = launch(None, name="nan", overrides=["train.learning_rate=1e6", "report.log_every_steps=50", *NO_EVALUATION])
    assert run.code == 1
    assert "is not finite" in run.output
    assert "Training rows: " in run.output and "train.jsonl, row " in run.output
    assert "Traceback" not in run.output
    assert len(run.losses()) >= 1
