"""Formats: what the columns of a row mean. Every format delivers `messages` (turns) or `text`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from finetune.config.sections.data import Format, SourceSection
from finetune.data.rows import RawRow, Row, describe
from finetune.errors import DataError

Turn = Mapping[str, Any]
"""One turn of a conversation: `role`, `content`, and whatever else the chat template reads."""

REQUIRED: Mapping[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
"""The columns that a row of the format must have; where the format is unset, the first that fits is taken."""

OPTIONAL: Mapping[Format, tuple[str, ...]] = {"instruction": ("input",)}
"""The columns that a row of the format may have."""

_UNREAD = ("tool_calls", "tool_call_id", "function_call", "reasoning_content", "thinking", "weight")
"""Parts of a turn that change what is learnt and are not supported: refused, never dropped."""


class RowFormat(Protocol):
    """Tells what the columns of a row mean."""

    def read(self, raw: RawRow) -> Row:
        """Return what the row says; raises DataError naming the row and the column."""

    def identity(self) -> Any:
        """Return, as JSON can hold it, what decides how rows are read."""


class AsRead:
    """The format of rows that have been read by another one."""

    def read(self, raw: RawRow) -> Row:
        """Return the row as it is."""
        return raw.parse()

    def identity(self) -> Any:
        """Return None: there is nothing to decide."""
        return None


AS_READ = AsRead()


@dataclass(frozen=True)
class ColumnFormat:
    """A format with the names that the user's columns have."""

    name: Format
    columns: Mapping[str, str]  # from the format's name to the user's
    key: str  # place of the source in the job YAML

    def read(self, raw: RawRow) -> Row:
        """Return `{"messages": turns}` or `{"text": text}`; raises DataError naming the row and the column."""
        row = raw.parse()
        try:
            return _READERS[self.name](_Columns(self, row))
        except DataError as error:
            raise DataError(f"{raw.place}: {error}") from error

    def identity(self) -> Any:
        """Return the name of the format and those of the columns."""
        return [self.name, dict(sorted(self.columns.items()))]


def choose_format(section: SourceSection, first: RawRow, *, key: str, say: Callable[[str], None]) -> ColumnFormat:
    """Return the format that is set, or the one that the columns of the first row decide, and say which.

    Raises DataError when no format fits or when `columns` maps a column that the format does not have.
    """
    if section.format is None:
        name = _detect(section.columns, first, key=key)
        say(f"{key}.format is not set: the columns {_listed(first.parse())} are read as `{name}`")
    else:
        name = section.format
    known = REQUIRED[name] + OPTIONAL.get(name, ())
    for column in section.columns:
        if column not in known:
            raise DataError(
                f"{key}.columns: format `{name}` has no column `{column}`; it has {_listed(known)}. "
                "Write the format's name first, then yours: {completion: answer}."
            )
    return ColumnFormat(name, dict(section.columns), key)


def _detect(columns: Mapping[str, str], first: RawRow, *, key: str) -> Format:
    row = first.parse()
    for name, required in REQUIRED.items():
        if all(columns.get(column, column) in row for column in required):
            return name
    choices = "; ".join(f"{name}: {_listed(required)}" for name, required in REQUIRED.items())
    raise DataError(
        f"{first.place}: cannot tell the format from its columns {_listed(row)}. Set {key}.format and map its columns "
        f"with {key}.columns (for example {{prompt: question, completion: answer}}). Formats are {choices}."
    )


class _Columns:
    """A row seen through a format's column names."""

    def __init__(self, form: ColumnFormat, row: Row) -> None:
        self._form = form
        self._row = row

    def value(self, column: str) -> Any:
        name = self._form.columns.get(column, column)
        if name not in self._row:
            raise DataError(
                f"has no column `{name}`; its columns are {_listed(self._row)}. "
                f"Map it with {self._form.key}.columns: {{{column}: NAME OF YOUR COLUMN}}."
            )
        return self._row[name]

    def text(self, column: str) -> str:
        value = self.value(column)
        if not isinstance(value, str):
            name = self._form.columns.get(column, column)
            raise DataError(f"column `{name}` must be text for format `{self._form.name}`, but is {describe(value)}.")
        return value

    def has(self, column: str) -> bool:
        return self._row.get(column) is not None

    def optional_text(self, column: str) -> str:
        name = self._form.columns.get(column, column)
        is_absent = self._row.get(name) is None and column not in self._form.columns
        return "" if is_absent else self.text(column)


def _read_messages(columns: _Columns) -> Row:
    turns = columns.value("messages")
    if columns.has("tools"):
        raise DataError("has a column `tools`, which is not read: the turns would be rendered without them.")
    if not isinstance(turns, list) or not turns:
        said = "an empty list" if turns == [] else describe(turns)
        raise DataError(f"`messages` must be a list of turns with `role` and `content`, but is {said}.")
    return {"messages": [_read_turn(number, turn) for number, turn in enumerate(turns, start=1)]}


def _read_turn(number: int, turn: object) -> Turn:
    if not isinstance(turn, dict):
        raise DataError(
            f"turn {number} of `messages` must be an object with `role` and `content`, but is {describe(turn)}."
        )
    for name in ("role", "content"):
        if not isinstance(turn.get(name), str):
            said = f"is {describe(turn[name])}" if name in turn else "is missing"
            raise DataError(f"`{name}` of turn {number} must be text, but {said}.")
    unread = [name for name in _UNREAD if turn.get(name) is not None]
    if unread:
        raise DataError(f"turn {number} has {_listed(unread)}, which is not read: only `role` and `content` are.")
    return {"role": turn["role"], "content": turn["content"]}


def _read_prompt_completion(columns: _Columns) -> Row:
    return _exchange(columns.text("prompt"), columns.text("completion"))


def _read_instruction(columns: _Columns) -> Row:
    """Join the input to the instruction below an empty line, as Alpaca's rows mean it."""
    asked = "\n\n".join(part for part in (columns.text("instruction"), columns.optional_text("input")) if part)
    return _exchange(asked, columns.text("output"))


def _read_text(columns: _Columns) -> Row:
    return {"text": columns.text("text")}


def _exchange(asked: str, answered: str) -> Row:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


_READERS: Mapping[Format, Callable[[_Columns], Row]] = {
    "messages": _read_messages,
    "prompt_completion": _read_prompt_completion,
    "instruction": _read_instruction,
    "text": _read_text,
}
