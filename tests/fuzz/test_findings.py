"""What the fuzzer has found once is a case for ever."""

from pathlib import Path

import pytest

from cases import Case, Ground

FINDINGS = sorted((Path(__file__).parent / "findings").glob("*.json"))


def test_there_are_findings():
    assert len(FINDINGS) >= 10


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: path.stem)
def test_what_was_found_once_does_not_come_back(path: Path, ground: Ground):
    assert ground.violation(Case.from_json(path.read_text(encoding="utf-8"))) is None


@pytest.mark.parametrize(
    "words", [("check", "job.yaml"), ("prepare", "--config", "job.yaml"), ("chat", "adapter"), ("evaluate", "runs/job")]
)
def test_the_healthy_project_is_healthy(words: tuple[str, ...], ground: Ground):
    assert ground.violation(Case(words)) is None


def test_a_violation_is_seen(ground: Ground):
    """The judge itself: a command that is refused with the wrong code, or that runs what it should not, is noticed."""
    said = ground.violation(Case(("no-such-command",)))
    assert said is None or "exit code" in said  # typer's own refusal is exit code 2
    assert "exit code 1" in (ground.violation(Case(("train", "--config", "job.yaml", "--set", "train.steps=6"))) or "")
