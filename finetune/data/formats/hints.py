"""Advice if the first row of a file fits no format: another delimiter, no header, records under a key."""

from collections import Counter

from finetune.config.section import DELIMITED_KINDS
from finetune.config.sections.data import SourceSection
from finetune.data.formats.columns import quoted_list
from finetune.data.formats.row_format import ColumnFormat
from finetune.data.rows import RawRow, Row, record_paths
from finetune.data.templates.row_template import WHOLE_ROW, columns_used
from finetune.errors import DataError
from finetune.registry.formats import FORMATS

DELIMITERS = (";", "\t", "|", ",")


def column_hint(section: SourceSection, row: Row, *, suffix: str) -> str:
    """Return advice for a file with this suffix whose row has unexpected columns; empty if there is none."""
    if suffix == ".json" and section.records is None and (paths := record_paths(row)):
        return f" If the file's rows are in `{paths[0]}`, write `records: {paths[0]}` next to its path."
    if suffix not in DELIMITED_KINDS or section.has_positions:
        return ""
    # a header that was not split at its delimiter is a single column
    delimiters = Counter(character for character in next(iter(row)) if character in DELIMITERS) if len(row) == 1 else {}
    if delimiters:
        delimiter = max(delimiters, key=lambda character: delimiters[character])
        quoted = {"\t": '"\\t"'}.get(delimiter, f'"{delimiter}"')
        return (
            f" The header is a single column that contains {'tabs' if delimiter == chr(9) else f'`{delimiter}`'}: if "
            f"that separates the columns, write `delimiter: {quoted}` next to the path."
        )
    form = section.format or "labelled"
    required = ("label", "text") if form == "labelled" else FORMATS[form].required
    positions = ", ".join(f"{column}: {position}" for position, column in enumerate(required))
    return (
        " If the file has no header and its first row is data, map positions next to its path: "
        f"`columns: {{{positions}}}`."
    )


def require_positions(section: SourceSection, first: RawRow, *, key: str) -> None:
    """Raise DataError if `columns` has a position beyond the end of the first row."""
    width = len(first.parse())
    positions = [*section.named_positions, *(yours for yours in section.columns.values() if isinstance(yours, int))]
    if max(positions, default=0) >= width:
        raise DataError(
            f"{key}.columns: there is no column at position {max(positions)} in {first.origin}: it has {width} "
            f"columns, 0 to {width - 1}."
        )


def require_columns(section: SourceSection, form: ColumnFormat, first: RawRow, *, key: str, suffix: str) -> None:
    """Raise DataError, with advice, if the first row of a delimited file lacks a column of its format.

    All rows of such a file have the same columns, so none of them could be read.
    """
    row = first.parse()
    if suffix not in DELIMITED_KINDS or any(WHOLE_ROW in columns_used(text) for text in section.template.values()):
        return
    names = section.column_names
    expected = [column for column in FORMATS[form.name].required if column not in section.template]
    missing = [names.get(column, column) for column in expected if names.get(column, column) not in row]
    if missing:
        raise DataError(
            f"{first.location}: has no column {quoted_list(missing)} for format `{form.name}`; its columns are "
            f"{quoted_list(row)}. Map yours with {key}.columns: {{{expected[0]}: NAME OF YOUR COLUMN}}."
            f"{column_hint(section, row, suffix=suffix)}"
        )
