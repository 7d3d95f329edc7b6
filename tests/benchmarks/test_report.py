import json
from pathlib import Path

import pytest
from rich.console import Console

from contest import plot, report
from contest.finding import Finding, Spread
from contest.measured import Measured, Table

MET = Finding(1, "tiny: ours - bare", Spread.of([0.4, 0.5, 0.6]), 1.0, "lower", unit="ms", note="16 tokens")
MISSED = Finding(2, "gsm8k: ours / Trainer", Spread.of([1.7, 1.8, 1.9]), 2.0, "higher", note="GSM8K's lengths")
AIM = Finding(2, "gsm8k: ours / Trainer", Spread.of([1.7, 1.8, 1.9]), 3.0, "higher", is_aim=True)


@pytest.fixture
def measured() -> dict[str, Measured]:
    return {
        "late": Measured([MISSED, AIM], [Table("A table", ("who", "ms"), [("bare", "1.5")], "its note")], {"raw": [1]}),
        "early": Measured([MET], missing=["gate 4: no accelerate"]),
    }


def test_gates_are_shown_in_their_order_with_lengths_and_what_is_missing(measured: dict[str, Measured]) -> None:
    console = Console(width=160, record=True)
    report.show(measured, console)
    text = console.export_text()
    assert text.index("tiny: ours - bare") < text.index("gsm8k: ours / Trainer")
    for words in ("A table", "its note", "0.5 (0.45-0.55, n=3) ms", "at most 1 ms", "aim: at least 3", "MISSED"):
        assert words in text
    assert "GSM8K's lengths" in text
    assert "not measured: gate 4: no accelerate" in text


def test_a_missed_gate_and_one_that_was_not_measured_fail_the_check(measured: dict[str, Measured]) -> None:
    first, second = report.failures(measured)
    assert first.startswith("gate 2 is missed: gsm8k: ours / Trainer: 1.8")
    assert second == "not measured: gate 4: no accelerate"
    assert report.failures({"early": Measured([MET, AIM])}) == []


def test_results_hold_findings_settings_and_the_machine(measured: dict[str, Measured], tmp_path: Path) -> None:
    report.write(measured, tmp_path / "results.json", options={"quick": "True"}, seconds=1.23)
    told = json.loads((tmp_path / "results.json").read_text())
    assert [each["verdict"] for each in told["findings"]] == ["met", "MISSED", "not reached"]
    assert told["settings"]["versions"]["torch"]
    assert told["settings"]["quick"] == "True"
    assert told["parts"]["late"] == {"raw": [1]}


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    plot.draw([MET, MISSED, AIM], tmp_path / "gates.png", title="a machine")
    assert (tmp_path / "gates.png").read_bytes()[:4] == b"\x89PNG"
