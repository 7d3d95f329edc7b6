"""What the judge reports, on runs that are written by hand: the same run with one thing wrong in it."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults import judge
from tests.faults.evidence import LATE, Attempted, History, Run, is_whole
from tests.faults.schedule import ALL, STEPS, Attempt, Fault, Moment, Place

FINISHED = {"state": "finished", "step": STEPS, "exit_code": 0}
FAILED = {"state": "failed", "exit_code": 1, "error": {"message": "lost contact with rank 1", "type": "LostContact"}}
KILLED = Fault("kill", Moment("forward", 4), "rank 1")
TWO = Attempt(Place("ddp", 2), (KILLED,))
GOOD = Attempted(0, "", 1.0, step_before=3, started_at=3, status=FINISHED, struck=(), orphans=(), torn=())
LOST = replace(GOOD, code=1, output="\nerror: lost contact with rank 1", status=FAILED, struck=(str(KILLED),))


def started(step: int) -> dict[str, Any]:
    return {"event": "RunStarted", "step": step}


def taken(step: int, **other: Any) -> dict[str, Any]:
    values = {"loss": 1 / step, "gradient_norm": 1.0, "learning_rate": 0.1, "samples_sha256": f"{step}"}
    return {"event": "StepTaken", "step": step, **values, **other}


STRAIGHT = [started(0), *map(taken, range(1, STEPS + 1))]


def write_run(folder: Path, events: list[dict[str, Any]], *, state: str = "a") -> Run:
    """Write a finished run with one checkpoint, and return it."""
    run = Run(folder / "run")
    checkpoint = run.folder / "checkpoints" / f"step-{STEPS:06d}"
    checkpoint.mkdir(parents=True)
    (run.folder / "final").mkdir()
    (run.folder / "final" / "model.safetensors").write_text(state)
    (run.folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    files = {}
    for name in ("index.json", "progress.json", "scalars.json", "model", "optimizer"):
        (checkpoint / name).write_text(name)
        files[name] = {"sha256": hashlib.sha256(name.encode()).hexdigest()}
    manifest = {"files": files, "state_sha256": state}
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    own = hashlib.sha256(text.encode()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "sha256": own}))
    return run


def end(tmp_path: Path, events: list[dict[str, Any]], *, is_exact: bool = True, state: str = "a") -> list[str]:
    reference = write_run(tmp_path / "reference", STRAIGHT)
    return judge.run_violations(write_run(tmp_path, events, state=state), reference=reference, is_exact=is_exact)


def test_a_run_that_took_steps_again_is_the_undisturbed_one(tmp_path: Path):
    assert end(tmp_path, [*STRAIGHT[:8], started(3), *STRAIGHT[4:]]) == []


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([*STRAIGHT[:5], *STRAIGHT[6:]], "step 6 was taken after step 4"),
        ([*STRAIGHT[:8], started(3), *STRAIGHT[5:]], "step 5 was taken after step 3"),
        ([*STRAIGHT[:8], *STRAIGHT[7:]], "step 7 was taken after step 7"),
        (STRAIGHT[:-1], f"not every step was taken: [{STEPS}] are missing"),
        ([*STRAIGHT[:-1], taken(STEPS, samples_sha256="other")], f"step {STEPS} took other samples"),
        ([*STRAIGHT[:-1], taken(STEPS, gradient_norm=1.0000001)], f"step {STEPS} has loss"),
    ],
)
def test_a_step_that_differs_from_the_reference_is_reported(tmp_path: Path, events: list[dict[str, Any]], problem: str):
    assert any(found.startswith(problem) for found in end(tmp_path, events))


def test_at_another_place_losses_may_differ_by_rounding_and_no_more(tmp_path: Path):
    near = [*STRAIGHT[:-1], taken(STEPS, loss=1 / STEPS + 9e-5)]
    assert end(tmp_path / "near", near, is_exact=False, state="b") == []
    far = [*STRAIGHT[:-1], taken(STEPS, loss=1 / STEPS + 2e-4)]
    assert len(end(tmp_path / "far", far, is_exact=False)) == 1


def test_a_different_state_and_leftover_files_are_reported(tmp_path: Path):
    other = end(tmp_path, STRAIGHT, state="b")
    assert [found.split(" ")[2] for found in other] == ["state", "weights"]
    run = Run(tmp_path / "run")
    (run.folder / "checkpoints" / ".staging-step-000033").mkdir()
    found = judge.run_violations(run, reference=Run(tmp_path / "reference" / "run"), is_exact=False)
    assert found == ["left checkpoints/.staging-step-000033"]


def test_a_checkpoint_is_complete_until_a_byte_of_it_changes(tmp_path: Path):
    run = write_run(tmp_path, STRAIGHT)
    (checkpoint,) = run.checkpoints()
    assert is_whole(checkpoint) and run.torn() == [] and run.newest_whole() == checkpoint
    (checkpoint / "model").write_text("Model")
    assert not is_whole(checkpoint) and run.torn() == [checkpoint.name] and run.newest_whole() is None
    run.damaged.add(checkpoint.name)
    assert run.torn() == [] and run.broken() == [checkpoint.name]


@pytest.mark.parametrize(
    ("ended", "problem"),
    [
        (GOOD, None),
        (LOST, None),
        (replace(GOOD, code=LATE), "did not end within"),
        (replace(GOOD, orphans=("7 sleep",)), "left 1 processes running"),
        (replace(GOOD, started_at=6), "began at step 6, and the newest valid checkpoint was of step 3"),
        (replace(GOOD, torn=("step-000006",)), "checkpoints that nobody has damaged"),
        (replace(GOOD, trusted=("step-000006",)), "did not set aside"),
        (replace(LOST, output=f"{LOST.output}\n{judge.TRACEBACK}\n  File x\nKeyError: 1"), "printed a traceback: Key"),
        (replace(LOST, output=""), "failed, and printed 0 messages"),
        (replace(LOST, output=LOST.output.strip()), None),
        (replace(LOST, output=2 * LOST.output), "failed, and printed 2 messages"),
        (replace(LOST, status={**FAILED, "state": "running"}), "ended with exit code 1, and status.json says"),
        (replace(LOST, status={**FAILED, "error": {}}), "failed, and status.json does not say why"),
        (replace(LOST, status={**FAILED, "exit_code": 7}), "failed with exit code 7"),
        (replace(LOST, status={}), "ended with exit code 1, and status.json says"),
        (replace(LOST, status={}, struck=("full disk 0",)), None),
        (replace(LOST, struck=()), "ended with exit code 1 though nothing befell it"),
        (replace(GOOD, status={**FINISHED, "step": 3}), "ended with exit code 0, and status.json says"),
    ],
)
def test_how_an_attempt_ended_is_judged(ended: Attempted, problem: str | None):
    found = judge.attempt_violations(ended, TWO, log=Path("log"))
    assert len(found) == (problem is not None), found
    assert problem is None or found[0].startswith(problem)


def test_no_message_is_required_after_all_processes_were_killed():
    fault = replace(KILLED, target=ALL)
    ended = replace(LOST, output="", status={"state": "running"}, struck=(str(fault),))
    assert judge.attempt_violations(ended, Attempt(TWO.place, (fault,)), log=Path("log")) == []
    assert judge.attempt_violations(ended, TWO, log=Path("log")) != []


def test_the_history_is_that_of_the_last_attempt_to_take_a_step():
    history = History.of([started(0), taken(1), taken(2), started(1), taken(2, loss=5.0)])
    assert history.problems == () and history.steps[2].loss == 5.0
