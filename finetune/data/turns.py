"""Reads turns of conversations in rows: `role` and `content`, or ShareGPT's `from` and `value`, with tools.

Content is text, or a list of text and image parts as in the formats of OpenAI and Hugging Face.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from finetune.data.rows import describe, parse_json, shortened
from finetune.errors import DataError

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


def read_turns(value: Any, *, title: str, with_images: bool = False) -> list[Turn]:
    """Return the turns; other keys are passed to the chat template unchanged.

    Null values are dropped, and arguments of tool calls in JSON text are parsed, since templates expect objects. With
    `with_images`, content may be a list of parts with images. Raises DataError naming the turn.
    """
    turns = enumerate(_listed(value, title=title), start=1)
    return [_read_turn(number, turn, with_images=with_images) for number, turn in turns]


def read_sharegpt_turns(value: Any, *, title: str, with_images: bool = False) -> list[Turn]:
    """Return the turns of a `conversations` column with ShareGPT's speakers, or with `role` and `content`."""
    turns = enumerate(_listed(value, title=title), start=1)
    return [_read_sharegpt_turn(number, turn, with_images=with_images) for number, turn in turns]


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


def _listed(value: Any, *, title: str) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        actual = "an empty list" if value == [] else describe(value)
        raise DataError(f"{title} must be a list of turns with `role` and `content`, but is {actual}.")
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
