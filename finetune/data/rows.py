"""Rows as a source delivers them, each knowing where it stands."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.errors import DataError

MAX_DEPTH = 100
"""Lists and objects in one another in a row."""

FAULTS_OF_VALUES = (RecursionError, OverflowError, UnicodeError, MemoryError)
"""What code raises that meets a value which no row should hold."""

_MAX_SHOWN = 80
_MAX_PLACES, _DEPTH = 8, 4
"""Lists that are named, and how many objects they are looked for in."""
_TOO_DEEP = f"nests lists or objects more than {MAX_DEPTH} deep. Flatten it, or remove it."

Row = Mapping[str, Any]
"""One row: column names and values."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row that may not have been parsed yet, so that its encoder pays for the parsing.

    `number` counts from 1 within `origin` (a file or a hub dataset); in a file of JSON lines it is the line.
    """

    origin: str
    number: int
    content: bytes | Row

    @property
    def place(self) -> str:
        """Return where the row stands, for an error message."""
        return row_location(self.origin, self.number)

    def parse(self) -> Row:
        """Return the row; raises DataError naming the line that is not one JSON object."""
        if not isinstance(self.content, bytes):
            return self.content
        try:
            row = parse_json(self.content)
        except UnicodeDecodeError as error:
            raise DataError(f"{self.origin}, line {self.number}: {not_utf8(error)}") from error
        except json.JSONDecodeError as error:
            raise DataError(
                f"{self.origin}, line {self.number}: not valid JSON: {error.msg} at column {error.colno}. "
                "Each line must be one JSON object."
            ) from error
        except DataError as error:
            raise DataError(f"{self.origin}, line {self.number}: {error}") from error
        if not isinstance(row, dict):
            raise DataError(
                f"{self.origin}, line {self.number}: a row must be a JSON object with columns, not {describe(row)}."
            )
        return row


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return what is wrong with bytes that are no UTF-8, and which encoding to try."""
    content: bytes = error.object
    others = {each for each in content.decode("utf-8", "replace") if not each.isascii()} - {"\ufffd"}
    what = f"not UTF-8 text: byte 0x{content[error.start]:02x} at position {error.start + 1:,} ({error.reason})."
    if others:
        return f"{what} Other characters next to it are UTF-8: fix this one."
    try:
        content.decode("cp1252")
    except UnicodeDecodeError:
        return f"{what} Write the file's `encoding` next to its path, such as `encoding: latin-1`."
    return f"{what} If the file is from Windows or Excel, write `encoding: cp1252` next to its path."


def parse_json(text: str | bytes) -> Any:
    """Return what the JSON text holds.

    Raises JSONDecodeError or UnicodeDecodeError for what is none, and DataError for what nobody can use: brackets in
    one another without end, numbers of thousands of digits, a name twice in one object.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError as error:
        raise DataError(_TOO_DEEP) from error
    except ValueError as error:  # Python reads no whole number of more digits than it says
        raise DataError("holds a number of thousands of digits. Write it as text, or remove it.") from error
    num_opened = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    if num_opened > MAX_DEPTH:
        require_shallow(value)
    return value


def require_shallow(value: Any) -> None:
    """Raise DataError where lists and objects stand in one another more than MAX_LEVELS deep."""
    level, num_levels = [value], 0
    while level := [inner for each in level for inner in _inner(each)]:
        num_levels += 1
        if num_levels > MAX_DEPTH:
            raise DataError(_TOO_DEEP)


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"has `{shortened(twice)}` twice in one object. Keep one of them.")
    return made


def shortened(text: str) -> str:
    """Return the beginning of a text for a message, without half characters."""
    return (text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...").encode(errors="backslashreplace").decode()


def require_valid_unicode(text: str) -> str:
    """Return the text; raises DataError where it holds half a character: JSON can write it, no tokenizer reads it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start : error.start + 1].encode("unicode_escape").decode()
        before = text[max(0, error.start - 12) : error.start]
        raise DataError(
            f"holds half of a surrogate pair ({half}) behind {before!r}: this is not valid Unicode. Remove it."
        ) from error
    return text


def row_location(origin: str, number: int) -> str:
    """Return where a row stands, for a message."""
    return f"{origin}, row {number}"


def describe(value: object) -> str:
    """Return the kind of a value in the words of a JSON file, with the value itself where it is short."""
    if value is None:
        return "null"
    kinds = {
        bool: "a truth value",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    kind = kinds.get(type(value), f"of type {type(value).__name__}")
    is_short = isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**40)
    return f"{kind} ({json.dumps(value)})" if is_short else kind


def record_places(value: Any, *, prefix: str = "", depth: int = _DEPTH) -> list[str]:
    """Return the dotted places of the lists of objects in an object, the outer ones first."""
    if not isinstance(value, dict) or depth == 0:
        return []
    inner = {f"{prefix}{name}": each for name, each in value.items() if "." not in name}
    own = [place for place, each in inner.items() if isinstance(each, list) and each and isinstance(each[0], dict)]
    further = (
        place for name, each in inner.items() for place in record_places(each, prefix=f"{name}.", depth=depth - 1)
    )
    return [*own, *further][:_MAX_PLACES]
