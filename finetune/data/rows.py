"""Rows as a source yields them, and the parts of their turns that are images."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from finetune.errors import DataError

MAX_DEPTH = 100
"""The maximum nesting depth of lists and objects in a row."""

FAULTS_OF_VALUES = (RecursionError, OverflowError, UnicodeError, MemoryError)
"""The exceptions that unreasonable values in a row may cause."""

_MAX_SHOWN = 80
_MAX_PATHS, _DEPTH = 8, 4
"""The number of record lists that a message names, and the depth to which objects are searched."""
_TOO_DEEP = f"nests lists or objects more than {MAX_DEPTH} levels deep. Flatten it, or remove it."

Row = Mapping[str, Any]
"""One row: column names and values."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row that may not have been parsed yet, so that parsing happens in the encoding workers.

    `number` counts from 1 within `origin` (a file or a hub dataset); in a file of JSON lines it is the line.
    """

    origin: str
    number: int
    content: bytes | Row

    @property
    def location(self) -> str:
        """Return the location of the row for messages."""
        return row_location(self.origin, self.number)

    def parse(self) -> Row:
        """Return the row; raises DataError naming the line if it is not a JSON object."""
        if not isinstance(self.content, bytes):
            return self.content
        try:
            row = parse_row_json(self.content)
        except UnicodeDecodeError as error:
            raise DataError(f"{self.origin}, line {self.number}: {not_utf8(error)}") from error
        except json.JSONDecodeError as error:
            raise DataError(
                f"{self.origin}, line {self.number}: not valid JSON: {error.msg.removesuffix(' at')} at column "
                f"{error.colno}. Each line must be one JSON object."
            ) from error
        except DataError as error:
            raise DataError(f"{self.origin}, line {self.number}: {error}") from error
        if not isinstance(row, dict):
            raise DataError(
                f"{self.origin}, line {self.number}: a row must be a JSON object with columns, not {describe(row)}."
            )
        return row


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return a message about bytes that are not valid UTF-8."""
    return (
        f"not UTF-8 text: byte 0x{error.object[error.start]:02x} at position {error.start + 1:,} ({error.reason}). Fix "
        "it, or write the file's encoding next to its path, such as `encoding: cp1252` of Windows and Excel."
    )


def parse_row_json(text: str | bytes) -> Any:
    """Return the value of the JSON text.

    Raises JSONDecodeError or UnicodeDecodeError for invalid JSON, and DataError for unusable values: excessive nesting,
    numbers with thousands of digits, duplicate names in an object.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError as error:
        raise DataError(_TOO_DEEP) from error
    except ValueError as error:  # Python limits the number of digits of an integer
        raise DataError("contains a number with thousands of digits. Write it as text, or remove it.") from error
    num_opened = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    if num_opened > MAX_DEPTH:
        require_shallow(value)
    return value


def require_shallow(value: Any) -> None:
    """Raise DataError if lists and objects are nested more than MAX_DEPTH levels deep."""
    level, num_levels = [value], 0
    while level := [
        child
        for parent in level
        if isinstance(parent, dict | list | tuple)
        for child in (parent.values() if isinstance(parent, dict) else parent)
    ]:
        num_levels += 1
        if num_levels > MAX_DEPTH:
            raise DataError(_TOO_DEEP)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise DataError(f"has `{shortened(duplicate)}` twice in one object. Keep one of them.")
    return value


def shortened(text: str) -> str:
    """Return the start of a text for a message, with surrogates escaped."""
    return (text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...").encode(errors="backslashreplace").decode()


def require_valid_unicode(text: str) -> str:
    """Return the text; raises DataError if it contains a lone surrogate, which JSON allows but tokenizers reject."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start : error.start + 1].encode("unicode_escape").decode()
        before = text[max(0, error.start - 12) : error.start]
        raise DataError(
            f"contains half of a surrogate pair ({half}) after {before!r}, which is not valid Unicode. Remove it."
        ) from error
    return text


def row_location(origin: str, number: int) -> str:
    """Return the location of a row for messages."""
    return f"{origin}, row {number}"


def describe(value: object) -> str:
    """Return the JSON type of a value in words, with the value itself if it is short."""
    if value is None:
        return "null"
    type_names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    type_name = type_names.get(type(value), f"of type {type(value).__name__}")
    is_short = isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10**40)
    return f"{type_name} ({json.dumps(value)})" if is_short else type_name


def record_paths(value: Any, *, prefix: str = "", depth: int = _DEPTH) -> list[str]:
    """Return the dotted paths of the lists of objects in an object, outer ones first."""
    if not isinstance(value, dict) or depth == 0:
        return []
    inner = {f"{prefix}{name}": child for name, child in value.items() if "." not in name}
    paths = [path for path, child in inner.items() if isinstance(child, list) and child and isinstance(child[0], dict)]
    nested = (path for name, child in inner.items() for path in record_paths(child, prefix=f"{name}.", depth=depth - 1))
    return [*paths, *nested][:_MAX_PATHS]


Part = Mapping[str, Any]
"""`{type: text, text: ...}` or `{type: image}`, optionally with `image` (the image) or `index`."""

_IMAGE_TYPES = ("image", "image_url")


def has_images(content: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether the content is a list of parts with at least one image."""
    return isinstance(content, list) and any(is_image_part(part) for part in content)


def is_image_part(part: Any) -> bool:
    """Return whether the part is an image."""
    return isinstance(part, Mapping) and part.get("type") in _IMAGE_TYPES


ARGUMENTS = "chat_template_kwargs"
"""The column with a row's chat template arguments, as in TRL and other libraries."""

Turn = Mapping[str, Any]
"""One turn: `role`, `content` (null only with a tool call), and other keys that the chat template reads."""


def read_tools(value: Any, *, title: str, are_functions: bool = False) -> list[Mapping[str, Any]]:
    """Return the tools' JSON schemas; raises DataError unless it is a list of objects.

    OpenAI's older `functions` lack the wrapper that chat templates expect.
    """
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{title} must be a list of tools as JSON schemas, or that list as JSON text.")
    if not are_functions:
        return value
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]


def read_template_arguments(value: Any, *, title: str) -> Mapping[str, Any]:
    """Return the arguments of the chat template; raises DataError unless it is an object."""
    try:
        value = parse_row_json(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise DataError(f"{title} is text that is not JSON: {error.msg}.") from error
    if not isinstance(value, dict):
        raise DataError(
            f"{title} must be an object of arguments of the chat template, such as "
            f'{{"enable_thinking": false}}, or that object as JSON text, but is {describe(value)}.'
        )
    return value
