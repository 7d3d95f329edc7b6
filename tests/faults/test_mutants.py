"""The harness can fail: with a bug planted in the product it reports the violation that the bug brings about."""

from pathlib import Path

import pytest

from tests.faults.mutated import MUTANTS, VARIABLE
from tests.faults.runner import Ground, Outcome
from tests.faults.schedule import BETWEEN, Attempt, Chain, Fault, Moment, Place

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SINGLE = Place("single", 1)
KILLED = Fault("kill", Moment("update.before", 13), "rank 0")
KILLED_IN_A_SAVE = Fault("kill", Moment("save.manifest", 12), "rank 0")
DAMAGED = Fault("damage", BETWEEN, "model", "flip")

CASES: dict[str, tuple[Fault, tuple[Fault, ...], bool, str]] = {
    "skip_verification": (KILLED, (DAMAGED,), False, "and the newest valid checkpoint was of step 9"),
    "shift_samples": (KILLED, (), False, "though nothing befell it"),
    "leave_a_process": (KILLED, (), False, "left 1 processes running"),
    "rename_early": (KILLED_IN_A_SAVE, (), False, "checkpoints that nobody has damaged are not whole: step-000012"),
    "seed_once": (KILLED, (), True, "the final state has another digest"),
    "forget_a_step": (KILLED, (), False, "step 14 was taken after step 12"),
}


def run(ground: Ground, name: str) -> Outcome:
    fault, later, adapter, _ = CASES[name]
    attempts = (Attempt(SINGLE, (fault,)), Attempt(SINGLE, later))
    return ground.run(Chain(0, 10_000 + list(CASES).index(name), adapter, False, 0, attempts))


def test_every_planted_bug_has_a_case():
    assert [mutant.__name__ for mutant in MUTANTS] == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_planted_bug_is_reported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.faults.processes.ORPHAN_SECONDS", 8.0)
    program = ("-m", "tests.faults.mutated")
    outcome = run(Ground(tmp_path, program=program, environment={VARIABLE: name}), name)
    assert outcome.struck, outcome.notes
    assert any(CASES[name][-1] in problem for problem in outcome.violations), (outcome.violations, outcome.notes)


@pytest.mark.parametrize("name", ["skip_verification", "rename_early", "seed_once"])
def test_the_same_chain_without_the_bug_violates_nothing(name: str, ground: Ground):
    outcome = run(ground, name)
    assert outcome.violations == []
    assert outcome.struck
