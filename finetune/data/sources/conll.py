"""Sentences of CoNLL files: a word and its tags on each line, and a blank line behind each sentence.

Source: Tjong Kim Sang & De Meulder, 2003, https://aclanthology.org/W03-0419
"""

import io
from collections.abc import Iterator, Sequence
from functools import partial

from finetune.data.rows import RawRow
from finetune.data.sources.decoding import decode_line
from finetune.data.sources.options import ReadOptions
from finetune.errors import DataError

MAX_SENTENCE_BYTES = 256 << 20
"""Of the longest sentence that is read."""

_DOCUMENT_START = "-DOCSTART-"


def conll_rows(stream: io.BufferedReader, origin: str, options: ReadOptions) -> Iterator[RawRow]:
    """Yield a row for each sentence: `tokens` and `tags`, the first and the last column, or columns by position.

    Lines with `-DOCSTART-` and comments before a sentence are left out. Raises DataError with the line that has more
    or fewer columns than the first one.
    """
    for number, sentence in enumerate(_sentences(stream, origin), start=1):
        columns = [list(column) for column in zip(*sentence, strict=True)]
        yield RawRow(origin, number, _row(columns, options))


def _row(columns: Sequence[list[str]], options: ReadOptions) -> dict[str, list[str]]:
    if options.has_header:  # no column has been named
        return {"tokens": columns[0], "tags": columns[-1]}
    return {options.column_name(position): column for position, column in enumerate(columns)}


def _sentences(stream: io.BufferedReader, origin: str) -> Iterator[list[list[str]]]:
    """Yield the words of each sentence with their tags, all of the same width."""
    sentence: list[list[str]] = []
    width = num_bytes = 0
    for number, text in _lines(stream, origin):
        if not text.strip():
            if sentence:
                yield sentence
            sentence, num_bytes = [], 0
            continue
        fields = text.split("\t") if "\t" in text else text.split()
        if fields[0] == _DOCUMENT_START or (not sentence and _is_comment(text, fields, width=width)):
            continue
        width = width or len(fields)
        if len(fields) != width or width < 2:
            raise DataError(f"{origin}, line {number}: {_ragged(fields, width)}")
        num_bytes += len(text)
        if num_bytes > MAX_SENTENCE_BYTES:
            raise DataError(f"{origin}, line {number}: the sentence has more than {MAX_SENTENCE_BYTES >> 20} MB.")
        sentence.append(fields)
    if sentence:
        yield sentence


def _lines(stream: io.BufferedReader, origin: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(iter(partial(stream.readline, MAX_SENTENCE_BYTES + 1), b""), start=1):
        if len(line) > MAX_SENTENCE_BYTES:
            raise DataError(f"{origin}, line {number}: has more than {MAX_SENTENCE_BYTES >> 20} MB: this is no word.")
        text = decode_line(line, origin=origin, number=number)
        yield number, text.removeprefix("\ufeff" if number == 1 else "").strip("\r\n")


def _is_comment(text: str, fields: Sequence[str], *, width: int) -> bool:
    """Tell whether a line before a sentence's first word is a comment, such as `# text = ...`, and not the word `#`."""
    return text.startswith("# ") and ("=" in text or len(fields) != (width or 2))


def _ragged(fields: Sequence[str], width: int) -> str:
    if width < 2:
        return "has one column, but each line needs a word and its tag, separated by a blank or a tab."
    return (
        f"has {len(fields)} column{'s' * (len(fields) != 1)}, and the lines before it {width}. Each line is a word and "
        "its tags; a blank line ends a sentence."
    )
