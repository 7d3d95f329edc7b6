"""A row seen through a format's column names: what the user's columns are called, or what a template makes of them."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.data.images.stored_image import ImageRoot, folder_of
from finetune.data.rows import Row, describe, parse_json, shortened
from finetune.data.templates.row_template import render_template
from finetune.errors import DataError


@dataclass(frozen=True)
class ColumnNames:
    """Where a format finds its columns in the user's rows."""

    format: str
    columns: Mapping[str, str]  # from the format's name to the user's
    template: Mapping[str, Any]  # from the format's name to a Jinja text, or to turns of such texts
    key: str  # place of the source in the job YAML
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # from a format's name to names of 0, 1, 2, ...
    image_root: ImageRoot | None = None  # that the files of images lie in
    has_arguments: bool = False  # the first row has arguments of the chat template


class Columns:
    """One row. Every method raises DataError naming the user's column."""

    def __init__(self, names: ColumnNames, row: Row, *, origin: str = "") -> None:
        self._names = names
        self._row = row
        self._origin = origin
        self._made: dict[str, Any] = {}  # what templates made, each once

    @property
    def folder(self) -> Path | None:
        """Return the folder from which relative paths in the row count; None where the row is in none."""
        return folder_of(self._origin)

    @property
    def image_root(self) -> ImageRoot | None:
        """Return where the files lie that the row may name as images."""
        return self._names.image_root

    def value(self, column: str) -> Any:
        """Return the value of a column that must be there."""
        if column in self._names.template:
            if column not in self._made:
                self._made[column] = render_template(self._names.template[column], self._row, column=column)
            return self._made[column]
        name = self._names.columns.get(column, column)
        if name not in self._row:
            raise DataError(
                f"has no column `{name}`; its columns are {quoted_list(self._row)}. "
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

    def number(self, column: str) -> float:
        """Return the number in a column that must be there; a template's text is read as one."""
        value = self.value(column)
        try:
            number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError(f"{self.title(column)} must be a number, but is {describe(value)}.")
        return number

    def truth(self, column: str) -> bool:
        """Return the truth value in a column that must be there: true or false, 1 or 0, or that as a text."""
        value = self.value(column)
        known = {"true": True, "1": True, "false": False, "0": False}
        truth = known.get(str(value).strip().lower())
        if truth is None:
            raise DataError(
                f"{self.title(column)} must be true or false, but is {describe(value)}. Convert other words with a "
                f"`template`: `label: '{{ label == \"good\" }}'`."
            )
        return truth

    def optional(self, column: str) -> Any:
        """Return the value, None where the row has none; a column that the user has named must be there."""
        is_named = column in self._names.columns or column in self._names.template
        return self.value(column) if is_named else self._row.get(column)

    def optional_text(self, column: str) -> str:
        """Return the text, empty where the row has none."""
        return "" if self.optional(column) is None else self.text(column)

    def labels(self, column: str) -> Any:
        """Return the value, a label or a list of them: whole numbers that the dataset has names for are those names."""
        value, names = self.value(column), self._names.classes.get(column)
        if names is None:
            return value
        return [self._named(each, column) for each in value] if isinstance(value, list) else self._named(value, column)

    def _named(self, label: Any, column: str) -> Any:
        names = self._names.classes[column]
        if not isinstance(label, int) or isinstance(label, bool):
            return label
        if not 0 <= label < len(names):
            unknown = "which stands for no label" if label == -1 else f"and there are {len(names)} classes"
            raise DataError(f"{self.title(column)} is {label}, {unknown}. Fix the row, or remove it.")
        return names[label]

    def json_value(self, column: str) -> Any:
        """Return the value, parsed where it is a text."""
        value = self.value(column)
        if not isinstance(value, str):
            return value
        try:
            return parse_json(value)
        except DataError as error:
            raise DataError(f"{self.title(column)} {error}") from error
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


def quoted_list(names: Iterable[object]) -> str:
    """Return the names in backticks, separated by commas; of very many the first."""
    known = [str(name) for name in names]
    more = [f"and {len(known) - _MAX_LISTED:,} more"] if len(known) > _MAX_LISTED else []
    return ", ".join([*(f"`{shortened(name)}`" for name in known[:_MAX_LISTED]), *more])


_MAX_LISTED = 40
