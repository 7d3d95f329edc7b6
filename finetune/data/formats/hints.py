"""What to write where the first row of a file fits no format: another delimiter, no header, records under a key."""

from collections import Counter
from collections.abc import Sequence

from finetune.config.section import DELIMITED_KINDS
from finetune.config.sections.data import SourceSection
from finetune.data.formats.columns import quoted_list
from finetune.data.formats.row_format import ColumnFormat
from finetune.data.rows import RawRow, Row, record_places
from finetune.data.templates.row_template import WHOLE_ROW, columns_used
from finetune.errors import DataError
from finetune.registry.formats import FORMATS

DELIMITERS = (";", "\t", "|", ",")


def delimiter_in(names: Sequence[str]) -> str | None:
    """Return the delimiter that the name of an only column holds, as if a header had not been cut; else None."""
    if len(names) != 1:
        return None
    found = Counter(character for character in names[0] if character in DELIMITERS)
    return found.most_common(1)[0][0] if found else None


def column_hint(section: SourceSection, row: Row, *, kind: str) -> str:
    """Return what to write for a file of this kind whose row has other columns than expected; empty: nothing known."""
    if kind == ".json" and section.records is None and (places := record_places(row)):
        return f" If the file's rows are in `{places[0]}`, write `records: {places[0]}` next to its path."
    if kind not in DELIMITED_KINDS or section.has_positions:
        return ""
    delimiter = delimiter_in(list(row))
    if delimiter is not None:
        shown = {"\t": '"\\t"'}.get(delimiter, f'"{delimiter}"')
        return (
            f" The header is one column with `{delimiter if delimiter != chr(9) else 'tabs'}` in it: if that separates "
            f"the columns, write `delimiter: {shown}` next to the path."
        )
    form = section.format or "labelled"
    required = ("label", "text") if form == "labelled" else FORMATS[form].required
    positions = ", ".join(f"{column}: {place}" for place, column in enumerate(required))
    return (
        " If the file has no header and its first row is data, map positions next to its path: "
        f"`columns: {{{positions}}}`."
    )


def require_positions(section: SourceSection, first: RawRow, *, key: str) -> None:
    """Raise DataError where `columns` has a position that the first row does not reach."""
    width = len(first.parse())
    positions = [*section.named_positions, *(yours for yours in section.columns.values() if isinstance(yours, int))]
    if max(positions, default=0) >= width:
        raise DataError(
            f"{key}.columns: there is no column at position {max(positions)} in {first.origin}: it has {width}, from 0 "
            f"to {width - 1}."
        )


def require_columns(section: SourceSection, form: ColumnFormat, first: RawRow, *, key: str, kind: str) -> None:
    """Raise DataError, with what to write, where the first row of a table of texts lacks a column of its format.

    In such a file all rows have the same columns, so that none of them could be read.
    """
    row = first.parse()
    if kind not in DELIMITED_KINDS or _reads_whole_row(section):
        return
    names = section.column_names
    expected = [column for column in FORMATS[form.name].required if column not in section.template]
    missing = [names.get(column, column) for column in expected if names.get(column, column) not in row]
    if missing:
        raise DataError(
            f"{first.location}: has no column {quoted_list(missing)} for format `{form.name}`; its columns are "
            f"{quoted_list(row)}. Map yours with {key}.columns: {{{expected[0]}: NAME OF YOUR COLUMN}}."
            f"{column_hint(section, row, kind=kind)}"
        )


def _reads_whole_row(section: SourceSection) -> bool:
    return any(WHOLE_ROW in columns_used(written) for written in section.template.values())
