"""Rows of a caller that cannot be written are one error, and nothing of them stays."""

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
