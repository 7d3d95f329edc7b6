"""Rows with labels: a text and its label, words and their tags."""

from finetune.data.formats.columns import Columns
from finetune.data.rows import Row, describe
from finetune.errors import DataError


def read_labelled(columns: Columns) -> Row:
    """Return text (`text_pair` beside it, where there is one) and label: one, or a list of them; numbers likewise."""
    label = columns.labels("label")
    if not all(isinstance(each, str | int | float) for each in (label if isinstance(label, list) else [label])):
        what = "must be text, a number or a truth value, or a list of texts or of numbers"
        raise DataError(f"{columns.title('label')} {what}, but is {describe(label)}.")
    row = {"text": columns.text("text"), "label": label}
    return row if columns.optional("text_pair") is None else {**row, "text_pair": columns.text("text_pair")}


def read_tagged(columns: Columns) -> Row:
    """Return the words and the tag of each."""
    words, tags = columns.value("tokens"), columns.labels("tags")
    for column, found, kinds, what in (("tokens", words, str, "texts"), ("tags", tags, str | int, "texts or numbers")):
        if not isinstance(found, list) or not all(isinstance(each, kinds) for each in found):
            raise DataError(f"{columns.title(column)} must be a list of {what}, but is {describe(found)}.")
    if len(words) != len(tags):
        raise DataError(
            f"{columns.title('tokens')} has {len(words)} words and {columns.title('tags')} {len(tags)} tags. "
            "Each word needs one tag."
        )
    return {"tokens": words, "tags": tags}
