"""Formats: what the columns of a row mean. They deliver `messages`, `text`, a preference pair or a labelled text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from finetune.config.sections.data import OPTIONAL_COLUMNS, REQUIRED_COLUMNS, Format, SourceSection
from finetune.data.formats.columns import Columns, Names, listed
from finetune.data.formats.row_template import WHOLE_ROW, check_template, columns_read
from finetune.data.formats.turns import Turn, read_sharegpt_turns, read_tools, read_turns
from finetune.data.rows import RawRow, Row, describe
from finetune.errors import DataError


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
    """A format with the names and templates that lead to the user's columns."""

    names: Names

    @property
    def name(self) -> Format:
        """Return the name of the format."""
        return self.names.format

    def read(self, raw: RawRow) -> Row:
        """Return `messages` (with `tools` where there are any), `text`, `text` and `label`, or a preference pair.

        Raises DataError naming the row and the column.
        """
        row = raw.parse()
        try:
            return _READERS[self.name](Columns(self.names, row, origin=raw.origin))
        except DataError as error:
            raise DataError(f"{raw.place}: {error}") from error

    def identity(self) -> Any:
        """Return the name of the format, those of the columns, and the templates."""
        return [self.name, dict(sorted(self.names.columns.items())), dict(sorted(self.names.template.items()))]


def choose_format(section: SourceSection, first: RawRow, *, key: str, say: Callable[[str], None]) -> ColumnFormat:
    """Return the format that is set, or the one that the columns of the first row decide; say which and what is unread.

    Raises DataError when no format fits, when `columns` or `template` has a column that the format does not have, or
    when a template is not Jinja.
    """
    for column, written in section.template.items():
        check_template(written, key=f"{key}.template.{column}")
    row = first.parse()
    name = section.format or _detect(section, first, key=key)
    if section.format is None:
        say(f"{key}.format is not set: the columns {listed(_available(section, row))} are read as `{name}`")
    known = REQUIRED_COLUMNS[name] + OPTIONAL_COLUMNS.get(name, ())
    for where, columns in (("columns", section.columns), ("template", section.template)):
        for column in columns:
            if column not in known:
                raise DataError(
                    f"{key}.{where}: format `{name}` has no column `{column}`; it has {listed(known)}. "
                    "Write the format's name first, then yours: {completion: answer}."
                )
    unread = _unread(section, row, known)
    if unread:
        say(f"{key}: columns that are not read: {listed(unread)}")
    return ColumnFormat(Names(name, dict(section.columns), dict(section.template), key))


def _detect(section: SourceSection, first: RawRow, *, key: str) -> Format:
    available = _available(section, first.parse())
    for name, required in REQUIRED_COLUMNS.items():
        known = required + OPTIONAL_COLUMNS.get(name, ())
        is_there = all(section.columns.get(column, column) in available for column in required)
        if is_there and all(column in known for column in (*section.columns, *section.template)):
            return name
    choices = "; ".join(f"{name}: {listed(required)}" for name, required in REQUIRED_COLUMNS.items())
    raise DataError(
        f"{first.place}: cannot tell the format from its columns {listed(available)}. Set {key}.format and map its "
        f"columns with {key}.columns (for example {{prompt: question, completion: answer}}), or write a "
        f"{key}.template. Formats are {choices}."
    )


def _available(section: SourceSection, row: Row) -> tuple[str, ...]:
    """Return the columns that a format may find: those that templates make, then the row's."""
    return tuple(dict.fromkeys((*section.template, *row)))


def _unread(section: SourceSection, row: Row, known: tuple[str, ...]) -> list[str]:
    by_template = {name for written in section.template.values() for name in columns_read(written)}
    if WHOLE_ROW in by_template:
        return []
    by_name = {section.columns.get(column, column) for column in known if column not in section.template}
    return [name for name in row if name not in by_template | by_name]


def _read_messages(columns: Columns) -> Row:
    turns = read_turns(columns.json_value("messages"), title=columns.title("messages"))
    return _with_tools({"messages": turns}, columns)


def _read_conversations(columns: Columns) -> Row:
    turns = read_sharegpt_turns(columns.json_value("conversations"), title=columns.title("conversations"))
    return _with_tools({"messages": [*_system(columns), *turns]}, columns)


def _read_prompt_completion(columns: Columns) -> Row:
    """Join both sides; what the assistant says in a prompt of several turns is context and not learnt."""
    asked, answered = _said(columns, "prompt", by="user"), _said(columns, "completion", by="assistant")
    row: dict[str, Any] = {"messages": [*asked, *answered]}
    if any(turn["role"] == "assistant" for turn in asked):
        row["num_context_turns"] = len(asked)
    return _with_tools(row, columns)


def _read_instruction(columns: Columns) -> Row:
    """Join the input to the instruction below an empty line, as Alpaca's rows mean it."""
    asked = "\n\n".join(part for part in (columns.text("instruction"), columns.optional_text("input")) if part)
    return {"messages": [*_system(columns), _turn("user", asked), _turn("assistant", columns.text("output"))]}


def _read_preference(columns: Columns) -> Row:
    """Return prompt and both answers as turns; without a prompt it is what both conversations begin with."""
    sides = {name: _said(columns, name, by="assistant") for name in ("chosen", "rejected")}
    if columns.optional("prompt") is not None:
        prompt = _said(columns, "prompt", by="user")
    else:
        if isinstance(columns.value("chosen"), str) or isinstance(columns.value("rejected"), str):
            raise DataError(
                f"has no `prompt`, and {columns.title('chosen')} is text: it is not known what it answers. "
                "Map the prompt with `columns`, or make turns of the transcript with a `template`."
            )
        pairs = zip(sides["chosen"][:-1], sides["rejected"][:-1], strict=False)
        prompt = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        sides = {name: turns[len(prompt) :] for name, turns in sides.items()}
    return _with_tools({"prompt": prompt, **sides}, columns)


def _read_labelled(columns: Columns) -> Row:
    label = columns.value("label")
    if not isinstance(label, str | int):
        raise DataError(f"{columns.title('label')} must be text or a whole number, but is {describe(label)}.")
    return {"text": columns.text("text"), "label": label}


def _read_text(columns: Columns) -> Row:
    return {"text": columns.text("text")}


def _said(columns: Columns, column: str, *, by: str) -> list[Turn]:
    """Return the turns of a column, which is the text of one turn or a list of turns."""
    value = columns.value(column)
    if isinstance(value, list):
        return read_turns(value, title=columns.title(column))
    return [_turn(by, columns.text(column))]


def _system(columns: Columns) -> list[Turn]:
    said = columns.optional_text("system")
    return [_turn("system", said)] if said else []


def _with_tools(row: Mapping[str, Any], columns: Columns) -> Row:
    if not columns.optional("tools"):
        return row
    tools = read_tools(columns.json_value("tools"), title=columns.title("tools"))
    return {**row, "tools": tools} if tools else row


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


_READERS: Mapping[Format, Callable[[Columns], Row]] = {
    "messages": _read_messages,
    "conversations": _read_conversations,
    "prompt_completion": _read_prompt_completion,
    "instruction": _read_instruction,
    "preference": _read_preference,
    "labelled": _read_labelled,
    "text": _read_text,
}
