"""Rows of a caller that cannot be written are one error, and nothing of them stays."""

import itertools

from finetune.errors import DataError
from finetune.run.state import python_inputs
from tests.refusals import refused


def test_a_row_that_is_nested_5000_levels_deep_is_named(tmp_path):
    deep: list = []
    for _ in range(5_000):
        deep = [deep]
    with refused(DataError, "data.train: row 2 ", varies=True):
        python_inputs.write_rows([{"text": "a"}, {"text": deep}], tmp_path, key="data.train")
    assert list(tmp_path.iterdir()) == []


def test_rows_that_do_not_end_stop_before_the_disk_is_full(tmp_path, monkeypatch):
    free = iter([5_000_000_000, 2_000_000_000, 900_000_000])
    monkeypatch.setattr(python_inputs, "free_bytes", lambda folder: next(free))
    with refused(DataError, "data.train", "3,000 rows", "1.0 GB"):
        python_inputs.write_rows(({"text": "a"} for _ in itertools.count()), tmp_path, key="data.train")
    assert list(tmp_path.iterdir()) == []
