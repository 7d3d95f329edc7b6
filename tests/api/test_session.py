"""A session under every strategy, with two processes each: its loop has the losses of `finetune train`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.report.history import read_events
from tests import launching
from tests.sample_records import read_samples
from tests.small_job import JOB, write_job

PROGRAM = Path(__file__).with_name("session_program.py")
SESSION_JOB = JOB.replace("runs/job", "runs/session")
STRATEGIES = [*("single", "zero3"), *(pytest.param(name, marks=pytest.mark.full) for name in ("ddp", "fsdp2", "zero2"))]
TOLERANCE = 1e-6
TIMEOUT_SECONDS = 400.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    """Return the folder of the job, and loss, gradient norm and learning rate of each step of `finetune train`."""
    folder = tmp_path_factory.mktemp("train")
    text = SESSION_JOB.replace("runs/session", "runs/job").replace("log_every", "sample_ids: true, log_every")
    job = write_job(folder, text=text)
    command = [sys.executable, "-m", "finetune", "train", "--config", str(job)]
    log = folder / "log"
    assert launching.run(command, log=log, timeout_seconds=TIMEOUT_SECONDS) == 0, log.read_text()
    taken = [event for event in read_events(folder / "runs/job/events.jsonl") if event["event"] == "StepTaken"]
    assert len(taken) == 8
    return folder, [[event["loss"], event["gradient_norm"], event["learning_rate"]] for event in taken]


def rows_of_steps(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the rows that the run took in each step, in the order of its microbatches."""
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    samples = read_samples(folder / "runs/job")
    return [[rows[i] for batch in samples[step][0] for i in batch] for step in sorted(samples)]


def launch(strategy: str, job: Path, results: Path) -> dict[str, Any]:
    words = (str(PROGRAM), str(job), str(results))
    command = [sys.executable, *words] if strategy == "single" else launching.accelerate_command(strategy, *words)
    log, environment = results.with_suffix(".log"), {"PYTHONPATH": str(launching.ROOT)}
    code = launching.run(command, log=log, timeout_seconds=TIMEOUT_SECONDS, environment=environment)
    assert code == 0, log.read_text()
    return json.loads(results.read_text())


@pytest.fixture(scope="module", params=STRATEGIES)
def session(
    request: pytest.FixtureRequest, trained: tuple[Path, list[list[float]]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a session's job and what the program found, for each strategy."""
    folder = tmp_path_factory.mktemp(request.param)
    job = write_job(folder, text=SESSION_JOB)
    (folder / "rows_of_steps.json").write_text(json.dumps(rows_of_steps(trained[0])))
    return folder, launch(request.param, job, folder / "results.json")


def largest_difference(some: list[list[float]], others: list[list[float]]) -> float:
    pairs = zip(some, others, strict=True)
    return max(abs(one - other) for row, other_row in pairs for one, other in zip(row, other_row, strict=True))


@pytest.mark.distributed
def test_loop_of_a_session_has_the_losses_of_train(session, trained):
    _, found = session
    assert found["start"] == 0
    assert largest_difference(found["loop"], trained[1][:4]) < TOLERANCE
    assert largest_difference(found["fifth"], trained[1][4:5]) < TOLERANCE


@pytest.mark.distributed
def test_loading_a_checkpoint_in_a_session_repeats_the_step_after_it(session):
    _, found = session
    assert (found["checkpoint"], found["loaded"], found["back"]) == ("step-000004", 4, 0)
    assert largest_difference(found["fifth"], found["fifth again"]) < TOLERANCE


@pytest.mark.distributed
def test_rows_of_a_step_in_two_calls_have_the_loss_and_gradient_of_train(session, trained):
    _, found = session
    assert largest_difference(found["rows"], trained[1][:3]) < 2e-6
    assert found["caller's random number"] == pytest.approx(0.6229016948897019)


@pytest.mark.distributed
def test_weights_are_honored_exactly_also_fractional_and_negative_ones(session):
    _, found = session
    by_weights, by_hand, from_logits = found["weights"]["loss"]
    assert by_weights == pytest.approx(by_hand, abs=2e-5) and from_logits == pytest.approx(by_hand, abs=2e-5)
    assert found["weights"]["norm"] > 0.01


@pytest.mark.distributed
@pytest.mark.parametrize("session", ["zero3"], indirect=True)
def test_a_checkpoint_of_a_session_under_zero3_is_resumed_by_one_process(session, trained, tmp_path):
    folder, _ = session
    rest = launch("single", folder / "job.yaml", tmp_path / "results.json")
    assert rest["start"] == 4
    assert largest_difference(rest["rest"], trained[1][4:]) < 2e-6
    assert rest["closed"] == "save: the session is closed. Make another one."


@pytest.mark.full
@pytest.mark.distributed
def test_ranks_follow_the_calls_of_rank_0_until_it_leaves(trained, tmp_path):
    job = write_job(tmp_path, text=SESSION_JOB)
    program = str(PROGRAM.with_name("following_program.py"))
    command = launching.accelerate_command("ddp", program, str(job), str(tmp_path / "results.json"))
    environment, log = {"PYTHONPATH": str(launching.ROOT)}, tmp_path / "log"
    launching.run(command, log=log, timeout_seconds=TIMEOUT_SECONDS, environment=environment)
    paths = [tmp_path / f"results.{rank}.json" for rank in (0, 1)]
    assert all(path.exists() for path in paths), log.read_text()
    led, followed = (json.loads(path.read_text()) for path in paths)
    assert largest_difference(led["earlier"], trained[1][:1]) < TOLERANCE  # of an earlier session in the same launch
    assert largest_difference(led["together"] + led["led"], trained[1][:3]) < TOLERANCE
    assert led["empty"] == "there are no rows. Pass at least one."
    assert "Functions must be importable." in led["lambda"] and led["samples"] == [3] and led["left"]
    assert followed["lost"].startswith(
        "LostContact: another process of the session is gone while this one calls `follow`"
    )


@pytest.mark.distributed
def test_an_error_within_a_step_ends_the_session(session):
    _, found = session
    assert "one loss per target" in found["mean"] and "`mean_loss` returned ()" in found["mean"]
    assert found["after error"].startswith("save: the session had an error at step 6: loss `mean_loss` returned ()")


@pytest.mark.distributed
def test_calls_that_cannot_be_made_are_refused_with_one_message(session, request):
    _, found = session
    refused = found["refused"]
    assert refused["empty"] == "there are no rows. Pass at least one."
    assert refused["no step"] == "optim_step: there is no gradient. Call `forward_backward` first."
    assert "row 1" in refused["columns"] and "messages" in refused["columns"]
    assert "Did you mean `importance_sampling`?" in refused["unknown loss"]
    assert refused["missing column"] == "loss `policy_gradient` reads `advantages` of every row, and these have none."
    assert refused["long"] == "rows, row 1: has 200 tokens, more than data.max_length: 128. Shorten it."
    assert "has no target" in refused["no weight"]
    assert refused["number of weights"] == "rows, row 1, `weights`: has 1 numbers for 2 tokens."
    assert "prompts, row 1" in refused["prompt"]
    assert refused["other thread"].startswith("optim_step: the session was opened in another thread.")
    assert refused["gradient"] == "save: there is a gradient that was not used. Call `optim_step` first."
    assert found["closed"].startswith("save: the session had an error at step 6")
    if not request.node.name.endswith("[single]"):
        assert "`rows` of `forward_backward` is not the same on rank 0 and rank 1" in refused["other rows"]
        assert "rank 0 calls `export`, and rank 1 calls `save`" in refused["other call"]
