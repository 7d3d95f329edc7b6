"""Access to a row by a format's column names, and advice for files whose rows lack these columns."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.config.sections.data import SourceSection
from finetune.data.images import ImageRoot, StoredImage, folder_of, looks_like_images, stored_image
from finetune.data.rows import RawRow, Row, describe, parse_row_json, shortened
from finetune.data.templates.row_template import render_template
from finetune.errors import DataError
from finetune.registry.formats import FORMATS

NO_LABELS = ("-1", "-100")
"""Numbers that mean "no label" in datasets of Hugging Face and in torch (`ignore_index`), next to null."""

NOTES = "notes"
"""What is counted about a row that its format read, in a key of it: a tuple of texts."""

_JSON_OF_TURNS = re.compile(r"""\s*(\[\s*)?\{\s*"(role|from|content|value|weight|tool_calls)"\s*:""")
"""The beginning of a turn, or of a list of turns, as JSON text."""


@dataclass(frozen=True)
class ColumnNames:
    """The mapping from a format's columns to the user's."""

    format: str
    columns: Mapping[str, str]  # from the format's column to the user's
    template: Mapping[str, Any]  # from the format's column to a Jinja text, or to turns with such texts
    key: str  # of the source in the job YAML
    joined: Mapping[str, Sequence[str]] = field(default_factory=dict)  # a format's column that is made of several
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by the format's column: names of 0, 1, 2, ...
    image_root: ImageRoot | None = None  # for files of images
    has_arguments: bool = False  # the first row has chat template arguments
    unread: Sequence[str] = ()  # columns that change what a row means and are not read


@dataclass(frozen=True)
class Columns:
    """One row. Every method raises DataError naming the user's column."""

    names: ColumnNames
    row: Row
    origin: str = ""
    _rendered: dict[str, Any] = field(default_factory=dict)  # templates, by column

    def image(self, value: Any, *, title: str) -> StoredImage:
        """Return the image that the value names or holds; a relative path starts at the folder of the row's file."""
        return stored_image(value, folder=folder_of(self.origin), title=title, root=self.names.image_root)

    def value(self, column: str) -> Any:
        """Return the value of a required column."""
        if column in self.names.template:
            if column not in self._rendered:
                self._rendered[column] = render_template(self.names.template[column], self.row, column=column)
            return self._rendered[column]
        if column in self.names.joined:
            return {name: self._required(name, column=column) for name in self.names.joined[column]}
        return self._required(self.names.columns.get(column, column), column=column)

    def _required(self, name: str, *, column: str) -> Any:
        if name not in self.row:
            key = f"{self.names.key}.columns"
            is_mapped = column in self.names.columns or column in self.names.joined
            remedy = f"Map it with {key}: {{{column}: NAME OF YOUR COLUMN}}. {PREVIEW}"
            if is_mapped:
                remedy = f"`{key}.{column}` names it. Fix the row, or name another column."
            raise DataError(f"has no column `{name}`; its columns are {quoted_list(self.row)}. {remedy}")
        return self.row[name]

    def text(self, column: str) -> str:
        """Return the text of a required column."""
        value = self.value(column)
        if not isinstance(value, str):
            raise DataError(
                f"{self.title(column)} must be text for format `{self.names.format}`, but is {describe(value)}."
            )
        return value

    def number(self, column: str) -> float:
        """Return the number in a required column; text, such as a rendered template, is parsed."""
        value = self.value(column)
        try:
            number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError(f"{self.title(column)} must be a finite number, but is {describe(value)}.")
        return number

    def truth(self, column: str) -> bool:
        """Return the boolean in a required column: true or false, 1 or 0, or one of these as text."""
        value = self.value(column)
        booleans = {"true": True, "1": True, "false": False, "0": False}
        truth = booleans.get(str(value).strip().lower())
        if truth is None:
            raise DataError(
                f"{self.title(column)} must be true or false, but is {describe(value)}. Convert other values with a "
                "`template`: `label: '{{ label == \"good\" }}'`."
            )
        return truth

    def optional(self, column: str) -> Any:
        """Return the value, None if the row has none."""
        if column in self.names.template:
            return self.value(column)
        if column in self.names.joined:
            return {name: self.row.get(name) for name in self.names.joined[column]}
        return self.row.get(self.names.columns.get(column, column))

    def lacking(self) -> tuple[str, ...]:
        """Return the user's columns that are mapped to optional ones and that the row does not have."""
        mapped = {**{column: (name,) for column, name in self.names.columns.items()}, **self.names.joined}
        optional = FORMATS[self.names.format].optional
        return tuple(name for column in mapped if column in optional for name in mapped[column] if name not in self.row)

    def optional_text(self, column: str) -> str:
        """Return the text, empty if the row has none."""
        return "" if self.optional(column) is None else self.text(column)

    def turns(self, column: str) -> Any:
        """Return the value of a column of turns or of a text; of a template, JSON text of turns is parsed.

        Other text that a template renders, such as a list of tool calls, stays text.
        """
        value = self.value(column)
        if column not in self.names.template or not isinstance(value, str) or not _JSON_OF_TURNS.match(value):
            return value
        parsed = self.json_value(column)
        turns = parsed if isinstance(parsed, list) else [parsed]
        return parsed if all(isinstance(turn, dict) and turn.keys() & {"role", "from"} for turn in turns) else value

    def listed(self, column: str) -> Any:
        """Return the value, of a template its JSON list if it renders to one."""
        value = self.value(column)
        return self.json_value(column) if isinstance(value, str) and value.lstrip().startswith("[") else value

    def unread_image(self) -> str:
        """Return the column with images that the job does not map to `images`; empty if it maps one."""
        if "images" in self.names.columns or "images" in self.names.template:
            return ""
        return next((name for name, value in self.row.items() if name != "images" and looks_like_images(value)), "")

    def labels(self, column: str) -> Any:
        """Return a label or a list of labels; integers are replaced by the dataset's names, None for -1 and -100."""
        value, names = self.value(column), self.names.classes.get(column)
        if names is None:
            return value
        labels = []
        for label in value if isinstance(value, list) else [value]:
            is_number = isinstance(label, int) and not isinstance(label, bool)
            is_label = is_number and str(label) not in NO_LABELS
            if is_label and not 0 <= label < len(names):
                raise DataError(
                    f"{self.title(column)} is {label}, but there are {len(names)} classes. Fix the row, or remove it."
                )
            labels.append(names[label] if is_label else None if is_number else label)
        return labels if isinstance(value, list) else labels[0]

    def json_value(self, column: str) -> Any:
        """Return the value, parsed if it is text."""
        value = self.value(column)
        if not isinstance(value, str):
            return value
        try:
            return parse_row_json(value)
        except DataError as error:
            raise DataError(f"{self.title(column)} {error}") from error
        except json.JSONDecodeError as error:
            raise DataError(
                f"{self.title(column)} is text that is not JSON: {error.msg} at line {error.lineno} column "
                f"{error.colno} ({value[max(0, error.pos - 20) : error.pos + 20]!r})."
            ) from error

    def title(self, column: str) -> str:
        """Return the column's name for messages."""
        if column in self.names.template:
            return f"the result of the template of `{column}`"
        if column in self.names.joined:
            return f"the columns {quoted_list(self.names.joined[column])}"
        return f"column `{self.names.columns.get(column, column)}`"


def quoted_list(names: Iterable[object]) -> str:
    """Return the first names in backticks, separated by commas, and the number of others."""
    all_names = [str(name) for name in names]
    more = [f"and {len(all_names) - _MAX_LISTED:,} more"] if len(all_names) > _MAX_LISTED else []
    return ", ".join([*(f"`{shortened(name)}`" for name in all_names[:_MAX_LISTED]), *more])


_MAX_LISTED = 40


DELIMITERS = (";", "\t", "|", ",")

PREVIEW = "`finetune preview FILE` prints the lines that read a file."


def require_column_positions(section: SourceSection, first: RawRow, *, key: str) -> None:
    """Raise DataError if `columns` has a position beyond the end of the first row."""
    width = len(first.parse())
    positions = [*section.named_positions, *section.positions]
    if max(positions, default=0) >= width:
        raise DataError(
            f"{key}.columns: there is no column at position {max(positions)} in {first.origin}: it has {width} "
            f"columns, 0 to {width - 1}."
        )
