"""Columns that are optional, or several that are one: under their own names and under the user's."""

import pytest

from finetune.config.sections.data import SourceSection
from finetune.data.formats.columns import NOTES
from finetune.data.formats.row_format import choose_format
from finetune.data.rows import RawRow
from finetune.errors import DataError
from tests.data.formats.test_row_format import KEY, read
from tests.refusals import refused

OPTIONAL = {
    "input": ({"instruction": "a", "ctx": "b", "output": "c"}, "ctx"),
    "negatives": ({"anchor": "a", "positive": "b", "neg": ["c"]}, "neg"),
    "images": ({"messages": [{"role": "user", "content": "a"}], "image": b"png"}, "image"),
    "system": ({"prompt": "a", "completion": "b", "rules": "c"}, "rules"),
}


@pytest.mark.parametrize("column", OPTIONAL)
def test_a_renamed_optional_column_may_be_missing_in_a_row(column):
    first, yours = OPTIONAL[column]
    section = SourceSection(path="rows.jsonl", columns={column: yours})
    form = choose_format(section, RawRow("rows.jsonl", 1, first), key=KEY, log=lambda _: None)
    without = {name: value for name, value in first.items() if name != yours}
    assert NOTES not in form.read(RawRow("rows.jsonl", 1, first))
    assert form.read(RawRow("rows.jsonl", 2, without)) == {**read(without), NOTES: (yours,)}
    assert form.read(RawRow("rows.jsonl", 3, {**first, yours: None})) == read(without)  # null is a value


def test_a_missing_required_column_that_is_mapped_does_not_ask_for_the_mapping():
    with refused(DataError, "`question`", "`data.train.columns.prompt`") as caught:
        read({"completion": "a", "q": "b"}, format="prompt_completion", columns={"prompt": "question"})
    assert "NAME OF YOUR COLUMN" not in str(caught.value)


def test_several_columns_of_negatives_are_one_list_without_the_blank_ones():
    row = {"query": "a", "positive": "b", "negative_1": "c", "negative_2": None, "negative_3": " "}
    said = []
    columns = {"negatives": ["negative_1", "negative_2", "negative_3", "negative_4"]}
    read_row = read(row, said, columns=columns)
    assert (read_row["negatives"], read_row[NOTES]) == (["c"], ("negative_4",))
    assert not any("unused" in line for line in said)


def test_a_positive_may_be_a_list_of_one_text():
    columns = {"positive": "pos", "negatives": "neg"}
    assert read({"query": "a", "pos": ["b"], "neg": ["c"]}, columns=columns)["positive"] == "b"
    for wrong in ([], ["b", "d"], [1]):
        with refused(DataError, "`pos`", "`positive: '{{ pos[0] }}'`"):
            read({"query": "a", "pos": wrong, "neg": ["c"]}, columns=columns)


def test_one_column_for_each_class_is_a_label():
    said = []
    row = {"comment": "a", "toxic": 1, "insult": 0, "id": 3}
    columns = {"text": "comment", "label": ["toxic", "insult"]}
    assert read(row, said, columns=columns) == {"text": "a", "label": {"toxic": 1, "insult": 0}}
    assert said[-1] == f"{KEY}: unused columns: `id`"
    with refused(DataError, "`insult`"):
        read({"comment": "a", "toxic": 1}, format="labelled", columns=columns)


def test_joined_columns_and_notes_are_part_of_what_a_row_is_but_not_of_its_content():
    row = RawRow("f", 1, {"text": "a", "x": 1, "y": 0})
    forms = [
        choose_format(SourceSection(path="f", columns={"label": names}), row, key=KEY, log=str)
        for names in (["x", "y"], ["y", "x"])
    ]
    assert forms[0].identity() != forms[1].identity()
