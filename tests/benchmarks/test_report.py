import json
from pathlib import Path

import pytest

from comparison import report
from comparison.results import PartResults, Result, Spread, Table

MET = Result(1, "tiny: ours - bare", Spread.of([0.4, 0.5, 0.6]), 1.0, "lower", unit="ms", note="16 tokens")
MISSED = Result(2, "gsm8k: ours / Trainer", Spread.of([1.7, 1.8, 1.9]), 2.0, "higher", note="GSM8K's lengths")
AIM = Result(2, "gsm8k: ours / Trainer", Spread.of([1.7, 1.8, 1.9]), 3.0, "higher", is_aim=True)
TABLE = Table("A table", ("who", "ms"), [("bare", "1.5")], "its note")


@pytest.fixture
def measured() -> dict[str, PartResults]:
    return {
        "late": PartResults([MISSED, AIM], [TABLE], {"raw": [1]}),
        "early": PartResults([MET], missing=["starts: no accelerate"]),
    }


def test_results_are_printed_in_order_with_lengths_and_missing_measurements(
    measured: dict[str, PartResults], capsys: pytest.CaptureFixture[str]
) -> None:
    report.show(measured)
    text = capsys.readouterr().out
    assert text.index("tiny: ours - bare") < text.index("gsm8k: ours / Trainer")
    for words in ("A table", "its note", "0.5 (0.45-0.55, n=3) ms", "at most 1 ms", "aim: at least 3", "MISSED"):
        assert words in text
    assert "GSM8K's lengths" in text
    assert "not measured: starts: no accelerate" in text


def test_a_missed_threshold_and_one_that_was_not_measured_fail_the_check(measured: dict[str, PartResults]) -> None:
    first, second = report.failures(measured)
    assert first.startswith("threshold missed: gsm8k: ours / Trainer: 1.8")
    assert second == "not measured: starts: no accelerate"
    assert report.failures({"early": PartResults([MET, AIM])}) == []


def test_results_hold_results_settings_and_the_machine(measured: dict[str, PartResults], tmp_path: Path) -> None:
    report.write(measured, tmp_path / "results.json", options={"quick": "True"}, seconds=1.23)
    written = json.loads((tmp_path / "results.json").read_text())
    assert [each["verdict"] for each in written["results"]] == ["met", "MISSED", "not reached"]
    assert written["settings"]["versions"]["torch"]
    assert written["settings"]["quick"] == "True"
    assert written["parts"]["late"] == {"raw": [1]}
