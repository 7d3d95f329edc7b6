"""An audit is read at any width, and no number of it is cut."""

import pytest

from finetune.commands.prepare import audit_rows, print_audit, sparkline
from finetune.data.audit import Histogram, Streamed, audit_sources
from finetune.data.token_cache.counts import Counts

COUNTS = Counts(rows=7473, samples=7469, tokens=1_358_002, targets=741_293, rows_without_target=4, longest=577)


@pytest.fixture
def audit():
    other = Counts(rows=100, samples=100, tokens=18_968, targets=10_378, truncated_rows=19, longest=409)
    return audit_sources({"data.train.mix.0": Streamed(lambda: COUNTS), "data.train.mix.1": Streamed(lambda: other)})


def test_audit_columns_without_any_value_are_omitted(audit):
    head, *rows = audit_rows(audit)
    assert "too long" not in head and "cut" in head
    assert [row[0] for row in rows] == ["data.train.mix.0 (so far)", "data.train.mix.1 (so far)", "total (so far)"]
    assert rows[0][head.index("targets")] == "741,293 (54.6%)"
    assert rows[2][head.index("rows")] == "7,573"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_number_is_cut(audit, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    print_audit(audit)
    said = capsys.readouterr().out
    assert "\u2026" not in said
    assert all(number in " ".join(said.split()) for number in ("1,376,970", "741,293 (54.6%)", "19 (19.0%)", "577"))


def test_a_bar_that_is_not_empty_is_seen():
    assert sparkline(Histogram((0.0, 1.0, 2.0, 3.0), (0, 1, 800))) == " ▁█"
    assert sparkline(Histogram((0.0, 1.0), (0,))) == " "
