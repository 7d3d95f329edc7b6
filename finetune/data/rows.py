"""Rows as a source yields them, and the turns of conversations in them.

Turns have `role` and `content`, or ShareGPT's `from` and `value`, and tools. Content is text, or a list of text and
image parts as in the formats of OpenAI and Hugging Face.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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


def not_utf8(error: UnicodeDecodeError, *, num_before: int = 0) -> str:
    """Return a message about bytes that are not valid UTF-8, of which `num_before` stand before those of the error."""
    content: bytes = error.object
    position = num_before + error.start + 1
    others = {character for character in content.decode("utf-8", "replace") if not character.isascii()} - {"\ufffd"}
    what = f"not UTF-8 text: byte 0x{content[error.start]:02x} at position {position:,} ({error.reason})."
    if others:
        return f"{what} Other characters in it are valid UTF-8: fix this one."
    try:
        content.decode("cp1252")
    except UnicodeDecodeError:
        return f"{what} Write the file's `encoding` next to its path, such as `encoding: latin-1`."
    return f"{what} If the file is from Windows or Excel, write `encoding: cp1252` next to its path."


def parse_json(text: str | bytes) -> Any:
    """Return the value of the JSON text.

    Raises JSONDecodeError or UnicodeDecodeError for invalid JSON, and DataError for unusable values: excessive nesting,
    numbers with thousands of digits, duplicate names in an object.
    """
    value = _decoded(_loads, text)
    num_opened = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    if num_opened > MAX_DEPTH:
        require_shallow(value)
    return value


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """Return the value that starts there, and the position after it; raises what `parse_json` raises."""
    value, end = _decoded(_raw_decode, text, start)
    if text.count("[", start, end) + text.count("{", start, end) > MAX_DEPTH:
        require_shallow(value)
    return value, end


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


_loads = partial(json.loads, object_pairs_hook=_object)
_raw_decode = json.JSONDecoder(object_pairs_hook=_object).raw_decode


def _decoded(decode: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return decode(*arguments)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError as error:
        raise DataError(_TOO_DEEP) from error
    except ValueError as error:  # Python limits the number of digits of an integer
        raise DataError("contains a number with thousands of digits. Write it as text, or remove it.") from error


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
_SOURCES = ("image", "path", "url", "bytes", "base64", "image_url")
"""The keys of an image part that may contain the image."""


def has_images(content: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether the content is a list of parts with at least one image."""
    return isinstance(content, list) and any(is_image(part) for part in content)


def is_image(part: Any) -> bool:
    """Return whether the part is an image."""
    return isinstance(part, Mapping) and part.get("type") in _IMAGE_TYPES


def _read_part(part: Any, *, number: int) -> Part:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if is_image(part):
        for name in _SOURCES:
            if part.get(name) is not None:
                source = part[name]
                nested = source.get("url") if name == "image_url" and isinstance(source, Mapping) else source
                return {"type": "image", "image": nested}
        index = part.get("index")
        return {"type": "image"} if index is None else {"type": "image", "index": index}
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    actual = f"a part of type {part.get('type')!r}" if isinstance(part, Mapping) else f"{describe(part)} as a part"
    raise DataError(f"turn {number} has {actual}. Only parts of types `text` and `image` are supported.")


ARGUMENTS = "chat_template_kwargs"
"""The column with a row's chat template arguments, as in TRL and other libraries."""

Turn = Mapping[str, Any]
"""One turn: `role`, `content` (null only with a tool call), and other keys that the chat template reads."""

_PLAIN = {"role", "content"}
_CALLS = ("tool_calls", "function_call")
_OTHER_WEIGHTS = ("loss", "train", "training", "train_detail", "mask", "masked", "loss_weight")
"""Other tools' names for a turn's `weight`, which would have no effect here."""

_WORDS = ("user", "assistant", "system", "tool", "developer")
_WORD = re.compile(r"\w[\w.-]{0,63}")
"""The pattern of roles, which templates write next to their control tokens."""

_ROLES: Mapping[str, str] = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "function_call"), "assistant"),
    **dict.fromkeys(("function", "function_response", "observation", "ipython"), "tool"),
}
"""From ShareGPT's speakers to the roles of chat templates."""


def read_turns(value: Any, *, title: str, with_images: bool = False, from_speakers: bool = False) -> list[Turn]:
    """Return the turns; other keys are passed to the chat template unchanged.

    Null values are dropped, and arguments of tool calls in JSON text are parsed, since templates expect objects. With
    `with_images`, content may be a list of parts with images; with `from_speakers`, turns may have ShareGPT's speakers.
    Raises DataError naming the turn.
    """
    if not isinstance(value, list) or not value:
        actual = "an empty list" if value == [] else describe(value)
        raise DataError(f"{title} must be a list of turns with `role` and `content`, but is {actual}.")
    read = _read_sharegpt_turn if from_speakers else _read_turn
    return [read(number, turn, with_images=with_images) for number, turn in enumerate(value, start=1)]


def read_tools(value: Any, *, title: str) -> list[Mapping[str, Any]]:
    """Return the tools' JSON schemas; raises DataError unless it is a list of objects."""
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{title} must be a list of tools as JSON schemas, or that list as JSON text.")
    return value


def read_template_arguments(value: Any, *, title: str) -> Mapping[str, Any]:
    """Return the arguments of the chat template; raises DataError unless it is an object."""
    try:
        value = parse_json(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise DataError(f"{title} is text that is not JSON: {error.msg}.") from error
    if not isinstance(value, dict):
        raise DataError(
            f"{title} must be an object of arguments of the chat template, such as "
            f'{{"enable_thinking": false}}, or that object as JSON text, but is {describe(value)}.'
        )
    return value


def _read_turn(number: int, turn: Any, *, with_images: bool) -> Turn:
    if not isinstance(turn, dict):
        raise DataError(f"turn {number} must be an object with `role` and `content`, but is {describe(turn)}.")
    role = turn.get("role")
    if turn.keys() == _PLAIN and role in _WORDS and isinstance(turn["content"], str):
        return turn
    if not isinstance(role, str):
        raise DataError(f"`role` of turn {number} must be text, but {_describe_value(turn, 'role')}.")
    if not _WORD.fullmatch(role):
        raise DataError(f"`role` of turn {number} must be a plain word such as `user`, but is {role[:64]!r}.")
    for name in _OTHER_WEIGHTS:
        if turn.get(name) is not None:
            raise DataError(
                f"turn {number} has `{name}`, which is not supported. `data.train_on` selects the turns to train on; "
                "to select single turns, write `weight: 0` or `weight: 1` and `data.train_on: per_message`."
            )
    present = {name: value for name, value in turn.items() if value is not None}
    calls = present.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise DataError(f"`tool_calls` of turn {number} must be a list of objects, but is {describe(calls)}.")
        present["tool_calls"] = [
            {**call, "function": _with_parsed_arguments(number, call["function"])}
            if isinstance(call.get("function"), dict)
            else _with_parsed_arguments(number, call)
            for call in calls
        ]
    return {**present, "content": _content(number, turn, with_images=with_images)}


def _content(number: int, turn: Mapping[str, Any], *, with_images: bool) -> str | list[Part] | None:
    content = turn.get("content")
    if isinstance(content, str):
        return content
    if with_images and has_images(content):
        return [_read_part(part, number=number) for part in content]
    if content is None and any(turn.get(name) for name in _CALLS):
        return None
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        part = content[0]
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
    hint = " Only a list with a single text part is supported." if isinstance(content, list) else ""
    raise DataError(f"`content` of turn {number} must be text, but {_describe_value(turn, 'content')}.{hint}")


def _describe_value(turn: Mapping[str, Any], name: str) -> str:
    return f"is {describe(turn[name])}" if name in turn else "is missing"


def _with_parsed_arguments(number: int, function: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(function.get("arguments"), str):
        return function
    try:
        return {**function, "arguments": parse_json(function["arguments"] or "{}")}
    except json.JSONDecodeError as error:
        raise DataError(f"the arguments of a tool call in turn {number} are not JSON: {error.msg}.") from error


def _read_sharegpt_turn(number: int, turn: Any, *, with_images: bool) -> Turn:
    if not isinstance(turn, dict):
        raise DataError(f"turn {number} must be an object with `from` and `value`, but is {describe(turn)}.")
    speaker = turn.get("from", turn.get("role"))
    if not isinstance(speaker, str) or speaker not in _ROLES:
        speakers = ", ".join(f"`{role}`" for role in _ROLES)
        actual = repr(shortened(speaker)) if isinstance(speaker, str) else str(speaker and describe(speaker))
        raise DataError(f"turn {number} is from {actual}. Supported speakers: {speakers}.")
    renamed = {name: value for name, value in turn.items() if name not in ("from", "value")}
    renamed |= {"role": _ROLES[speaker], "content": turn.get("value", turn.get("content"))}
    if speaker == "function_call":  # its calls, in the format that chat templates expect
        calls = renamed["content"]
        try:
            calls = parse_json(calls) if isinstance(calls, str) else calls
        except json.JSONDecodeError as error:
            raise DataError(f"turn {number} is a function call that is not JSON: {error.msg}.") from error
        calls = calls if isinstance(calls, list) else [calls]
        if not all(isinstance(call, dict) and "name" in call for call in calls):
            raise DataError(f"turn {number} is a function call, which must be JSON with `name` and `arguments`.")
        renamed |= {"content": None, "tool_calls": [{"type": "function", "function": call} for call in calls]}
    return _read_turn(number, renamed, with_images=with_images)
