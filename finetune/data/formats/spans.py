"""Spans of a text, as annotation tools export them, as words with IOB2 tags (Ramshaw and Marcus, 1995)."""

import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from finetune.data.formats.columns import Columns
from finetune.data.rows import Row, describe, shortened
from finetune.errors import DataError

_STARTS = ("start", "start_offset", "start_char", "begin")
_ENDS = ("end", "end_offset", "end_char", "stop")
_LABELS = ("label", "labels", "entity_group", "entity_type", "entity", "type", "tag", "category")
"""Keys of spans in the exports of Prodigy, doccano, spaCy, Label Studio, Argilla and transformers."""

Span = tuple[int, int, str]


def read_spans(columns: Columns) -> Row:
    """Return the words of the text and the tag of each; without spans, every word is outside.

    Words are runs of letters and digits; other characters, and Chinese and Japanese ones, are words of their own.
    Null instead of a list of spans means that the text is not labelled. Raises DataError for a span that is not made
    of whole words, lies outside the text or overlaps another one.
    """
    text, value = columns.text("text"), columns.json_value("spans") if columns.value("spans") is not None else None
    words = list(_words(text))
    tokens = [text[start:end] for start, end in words]
    if value is None:
        return {"tokens": tokens, "tags": [None] * len(tokens)}
    if not isinstance(value, list):
        raise DataError(f"{columns.title('spans')} must be a list of [start, end, label], but is {describe(value)}.")
    tags, last = ["O"] * len(words), (0, 0, "")
    index_at = {start: index for index, (start, _) in enumerate(words)}
    index_after = {end: index + 1 for index, (_, end) in enumerate(words)}
    for start, end, label in sorted({read_span(number, span) for number, span in enumerate(value, start=1)}):
        where = f"span [{start}, {end}, {shortened(label)}]"
        if not 0 <= start < end <= len(text):
            raise DataError(f"{where} is not within the text, which has {len(text)} characters.")
        if start < last[1]:
            raise DataError(f"{where} overlaps [{last[0]}, {last[1]}, {shortened(last[2])}]. A word has one tag.")
        if start not in index_at or end not in index_after:
            raise DataError(
                f"{where} does not begin and end at the edge of a word: it is {shortened(text[start:end])!r} in "
                f"{shortened(text[max(0, start - 12) : end + 12])!r}. Offsets count characters. Fix the span."
            )
        first = index_at[start]
        tags[first : index_after[end]] = [f"B-{label}", *[f"I-{label}"] * (index_after[end] - first - 1)]
        last = (start, end, label)
    return {"tokens": tokens, "tags": tags}


def words_of(text: str) -> list[str]:
    """Return the words of a text as `read_spans` reads them."""
    return [text[start:end] for start, end in _words(text)]


def _words(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of every word."""
    kinds = "".join(" " if character.isspace() else "." if _stands_alone(character) else "w" for character in text)
    yield from (match.span() for match in re.finditer(r"w+|\.", kinds))


def _stands_alone(character: str) -> bool:
    is_ideograph = "\u3040" <= character <= "\u9fff" or character >= "\U00020000"
    return is_ideograph or (unicodedata.category(character)[0] not in "LMN" and character != "_")


def read_span(number: int, span: Any) -> Span:
    """Return start, end and label of a span, which is a list of these or an object."""
    values: list[Any] = list(span) if isinstance(span, list | tuple) else []
    if isinstance(span, Mapping):
        values = [next((span[name] for name in names if name in span), None) for names in (_STARTS, _ENDS, _LABELS)]
    if len(values) == 3 and isinstance(values[2], list) and len(values[2]) == 1:
        values[2] = values[2][0]
    is_span = len(values) == 3 and all(type(offset) is int for offset in values[:2])
    if not is_span or not isinstance(values[2], str | int) or not str(values[2]).strip():
        raise DataError(
            f"span {number} must be [start, end, label] or an object with `start`, `end` and `label`, but is "
            f"{shortened(str(span))}."
        )
    return values[0], values[1], str(values[2])
