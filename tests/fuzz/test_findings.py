"""What the fuzzer has found once is a case for ever."""

from pathlib import Path

import pytest

from tests.fuzz.cases import Case, Ground

pytestmark = pytest.mark.full

FINDINGS = sorted((Path(__file__).parent / "findings").glob("*.json"))


def test_recorded_fuzzing_findings_exist():
    assert len(FINDINGS) >= 10


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: path.stem)
def test_findings_of_earlier_fuzzing_stay_fixed(path: Path, ground: Ground):
    assert ground.violation(Case.from_json(path.read_text(encoding="utf-8"))) is None


@pytest.mark.parametrize(
    "words", [("check", "job.yaml"), ("prepare", "--config", "job.yaml"), ("chat", "adapter"), ("evaluate", "runs/job")]
)
def test_the_healthy_project_is_healthy(words: tuple[str, ...], ground: Ground):
    assert ground.violation(Case(words)) is None


def test_the_judge_reports_every_violation(ground: Ground, monkeypatch: pytest.MonkeyPatch):
    elsewhere = Case(("checkpoint", "export", "runs/job", "--to", "elsewhere/x"))
    assert (ground.violation(elsewhere) or "").startswith("wrote elsewhere")
    other = Case(
        ("train", "--config", "job.yaml", "--set", "run.seed=8", "--set", "run.folder=runs/x"), same_model=True
    )
    assert (ground.violation(other) or "").startswith("trained another model")
    monkeypatch.setattr("tests.fuzz.cases.MAX_SECONDS", 0.0)
    assert (ground.violation(Case(("check", "job.yaml"))) or "").startswith("took")
