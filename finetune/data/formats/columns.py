"""A row seen through a format's column names: what the user's columns are called, or what a template makes of them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.config.sections.data import Format
from finetune.data.formats.row_template import rendered
from finetune.data.rows import Row, describe
from finetune.errors import DataError


@dataclass(frozen=True)
class Names:
    """Where a format finds its columns in the user's rows."""

    format: Format
    columns: Mapping[str, str]  # from the format's name to the user's
    template: Mapping[str, Any]  # from the format's name to a Jinja text, or to turns of such texts
    key: str  # place of the source in the job YAML


class Columns:
    """One row. Every method raises DataError naming the user's column."""

    def __init__(self, names: Names, row: Row) -> None:
        self._names = names
        self._row = row
        self._made: dict[str, Any] = {}  # what templates made, each once

    def value(self, column: str) -> Any:
        """Return the value of a column that must be there."""
        if column in self._names.template:
            if column not in self._made:
                self._made[column] = rendered(self._names.template[column], self._row, column=column)
            return self._made[column]
        name = self._names.columns.get(column, column)
        if name not in self._row:
            raise DataError(
                f"has no column `{name}`; its columns are {listed(self._row)}. "
                f"Map it with {self._names.key}.columns: {{{column}: NAME OF YOUR COLUMN}}."
            )
        return self._row[name]

    def text(self, column: str) -> str:
        """Return the text of a column that must be there."""
        value = self.value(column)
        if not isinstance(value, str):
            raise DataError(
                f"{self.title(column)} must be text for format `{self._names.format}`, but is {describe(value)}."
            )
        return value

    def optional(self, column: str) -> Any:
        """Return the value, None where the row has none; a column that the user has named must be there."""
        is_named = column in self._names.columns or column in self._names.template
        return self.value(column) if is_named else self._row.get(column)

    def optional_text(self, column: str) -> str:
        """Return the text, empty where the row has none."""
        return "" if self.optional(column) is None else self.text(column)

    def json_value(self, column: str) -> Any:
        """Return the value, parsed where it is a text."""
        value = self.value(column)
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{self.title(column)} is text that is not JSON: {error.msg} at line {error.lineno} column "
                f"{error.colno} ({value[max(0, error.pos - 20) : error.pos + 20]!r})."
            ) from error

    def title(self, column: str) -> str:
        """Return what the column is called in messages."""
        if column in self._names.template:
            return f"what the template of `{column}` makes"
        return f"column `{self._names.columns.get(column, column)}`"


def listed(names: Iterable[object]) -> str:
    """Return the names in backticks, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)
