"""A run that is told to stop on one rank stops on all, saved, and goes on elsewhere."""

import json
import re

import pytest

SIGNAL_AT_STEP_2 = [
    "evaluate.every_steps=2",
    "evaluate.generate={num_samples: 3, max_new_tokens: 2, metrics: ['tests.run.metrics_that_signal:terminate']}",
    "train.steps=20",
]

NO_EVALUATION = ["evaluate=null", "data.validation=null"]


@pytest.mark.distributed
def test_sigterm_on_one_rank_saves_on_all_and_another_strategy_goes_on(launch):
    stopped = launch("ddp", name="signalled", overrides=SIGNAL_AT_STEP_2)
    assert stopped.code != 0  # the launcher says 1 for 143
    assert "signal SIGTERM" in stopped.output
    assert len(stopped.losses()) == 3  # the step after the signal is finished, then all stop
    assert [path.name for path in (stopped.folder / "checkpoints").glob("step-*")] == ["step-000003"]
    assert not (stopped.folder / "final").exists()
    calm = [*SIGNAL_AT_STEP_2[:1], SIGNAL_AT_STEP_2[2]]
    straight = launch(None, name="not-signalled", overrides=calm)
    went_on = launch("zero3", name="signalled", overrides=calm)
    assert went_on.code == 0, went_on.output
    assert went_on.losses() == pytest.approx(straight.losses(), rel=1e-4)
    assert (went_on.folder / "final" / "model.safetensors").exists()


@pytest.mark.distributed
def test_a_finished_run_is_not_trained_again(launch):
    first = launch(None, name="finished")
    again = launch(None, name="finished")
    assert first.code == again.code == 0, again.output
    assert again.losses() == first.losses()


@pytest.mark.distributed
def test_another_jobs_folder_is_refused(launch):
    assert launch(None, name="mine", overrides=["train.stop_after_steps=1"]).code == 0
    other = launch(None, name="mine", overrides=["run.seed=8"])
    assert other.code == 2
    assert "run.seed" in other.output
    assert "Traceback" not in other.output


@pytest.mark.distributed
def test_what_the_run_is_stands_in_its_folder(launch):
    run = launch(None, name="described", overrides=["train.stop_after_steps=1"])
    resolved = (run.folder / "resolved.yaml").read_text()
    assert re.search(r"learning_rate: 0\.01 +# job\.yaml line 21$", resolved, re.MULTILINE), resolved
    assert re.search(r"stop_after_steps: 1 +# --set", resolved), resolved
    assert (run.folder / "config.yaml").read_text().startswith("\nrun:")
    facts = json.loads((run.folder / "environment.json").read_text())
    assert facts["packages"]["torch"]


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
    run = launch(None, name="nan", overrides=["train.learning_rate=1e30", "report.log_every_steps=50", *NO_EVALUATION])
    assert run.code == 1
    assert "is not finite" in run.output
    assert "Traceback" not in run.output
    assert len(run.losses()) >= 1
