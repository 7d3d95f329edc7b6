"""A run of many faults goes on where it was interrupted, and again with what violated once the source has changed."""

from dataclasses import replace

import pytest

from tests.faults.record import Line, Record, page

RIGHT = Line(0, "full", "ddp:2", ("kill rank 0",), ("finished",), (), "", 2, 1.0)
WRONG = replace(RIGHT, number=1, violations=("step 3 has another loss",))


@pytest.mark.parametrize(
    ("source", "keep", "left"), [("a", False, [0, 1]), ("a", True, [0, 1]), ("b", False, []), ("b", True, [0])]
)
def test_a_record_reopened_for_another_source_keeps_lines_only_if_requested(tmp_path, source, keep, left):
    first = Record(tmp_path / "runs" / "faults.jsonl", seed=0, source="a")
    for line in (RIGHT, WRONG):
        first.add(line)
    for _ in range(2):  # what is kept is the new source's from then on
        again = Record(tmp_path / "runs" / "faults.jsonl", seed=0, source=source, keep=keep)
        assert [line.number for line in again.lines] == left
    assert Record(tmp_path / "runs" / "faults.jsonl", seed=1, source=source, keep=True).lines == []


def test_violations_are_listed_in_the_order_of_the_chains():
    text = page([WRONG, RIGHT], seed=0)
    assert text.index("| 0 | full |") < text.index("| 1 | full |") and "1 runs violated" in text
