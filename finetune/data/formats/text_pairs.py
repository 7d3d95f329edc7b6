"""Formats of related texts: an anchor or a query with passages, or two texts and a score."""

from typing import Any

from finetune.data.formats.columns import Columns
from finetune.data.rows import Row, describe
from finetune.errors import DataError


def read_pairs(columns: Columns) -> Row:
    """Return the anchor, its positive, and the negatives of both columns."""
    return _group(columns, "anchor")


def read_retrieval(columns: Columns) -> Row:
    """Return the query as the anchor, its positive, and the negatives of both columns."""
    return _group(columns, "query")


def read_scored_pairs(columns: Columns) -> Row:
    """Return both texts and their score."""
    texts = {"text": columns.text("sentence1"), "text_pair": columns.text("sentence2")}
    return {**texts, "score": columns.number("score")}


def _group(columns: Columns, anchor: str) -> Row:
    row = {"anchor": columns.text(anchor), "positive": columns.text("positive")}
    single = columns.optional_text("negative")
    return {**row, "negatives": [*([single] if single.strip() else []), *_negatives(columns)]}


def _negatives(columns: Columns) -> list[str]:
    """Return the texts of the list without null and blank ones, which pad rows to equal numbers."""
    value = columns.optional("negatives")
    if value is None or value == "":
        return []
    texts: Any = columns.json_value("negatives")
    if not isinstance(texts, list):
        raise DataError(f"{columns.title('negatives')} must be a list of texts, but is {describe(texts)}.")
    for text in texts:
        if text is not None and not isinstance(text, str):
            raise DataError(f"{columns.title('negatives')} must be a list of texts, but contains {describe(text)}.")
    return [text for text in texts if text is not None and text.strip()]
