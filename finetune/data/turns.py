"""Turns of conversations, read from the shapes of many tools (`registry/turns.py`) into the shapes of chat templates.

Content is text, or a list of text and image parts as in the formats of OpenAI and Hugging Face.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.data.formats.columns import quoted_list
from finetune.data.rows import Part, Turn, describe, is_image_part, parse_row_json
from finetune.errors import DataError
from finetune.registry.turns import CONTENT_KEYS, PAIRS, ROLE_KEYS, STANDARD_ROLES, RoleEntry, find_role
from finetune.runtime.text.terminal import format_json

_PLAIN = {"role", "content"}
_WORD = re.compile(r"\w[\w.-]{0,63}")
"""The pattern of roles, which templates write next to their control tokens."""


def read_turns(value: Any, *, title: str, with_images: bool = False) -> list[Turn]:
    """Return the turns of a list, or a single turn, in the keys and roles of chat templates.

    The keys, roles and questions with answers of other tools (`registry.turns`), the parts of Anthropic, Bedrock and
    Gemini, and OpenAI's `function_call` are converted; words for the role `tool` and unknown roles are left to the
    encoder, which knows the template's. Other keys are passed on. Null values are dropped, and arguments of tool
    calls in JSON text are parsed, since templates expect objects. A tool call that is a turn of its own is added to the
    assistant's turn before it. With `with_images`, content may have images. Raises DataError naming the turn.
    """
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list) or not items:
        actual = "an empty list" if value == [] else describe(value)
        raise DataError(f"{title} must be a list of turns with `role` and `content`, but is {actual}.")
    if isinstance(value, dict) and not turn_keys(value):
        keys = quoted_list(value) or "none"
        raise DataError(f"{title} must be text, a turn or a list of turns, but is an object; its keys are {keys}.")
    turns: list[Turn] = []
    for number, item in enumerate(items, start=1):
        is_plain = isinstance(item, dict) and item.keys() == _PLAIN and isinstance(item["content"], str)
        if is_plain and item["role"] in STANDARD_ROLES:
            turns.append(item)
            continue
        for turn in _separate_turns(number, item):
            entry = find_role(turn["role"])
            read = _read_turn(number, turn, entry, with_images=with_images)
            is_call = entry is not None and entry.is_call
            if is_call and turns and _without_content(turns[-1]) == _without_content(read[0]):
                calls = [*turns[-1].get("tool_calls", ()), *read[0]["tool_calls"]]
                turns[-1] = {**turns[-1], "tool_calls": calls}
            else:
                turns += read
    return turns


def turn_keys(value: Any) -> tuple[str, ...]:
    """Return the keys of role and content, or of question and answer, of the first turn; empty for unknown ones."""
    item = value[0] if isinstance(value, list) and value else value
    if not isinstance(item, Mapping):
        return ()
    keys = [next((name for name in names if item.get(name) is not None), "") for names in (ROLE_KEYS, CONTENT_KEYS)]
    pair = next((pair for pair in PAIRS if item.keys() >= set(pair)), ())
    return tuple(keys) if keys[0] else pair or (tuple(item) if all(map(find_role, item)) else ())


def _separate_turns(number: int, item: Any) -> list[Turn]:
    """Return the item with the keys `role` and `content`; a question with its answer is two turns."""
    if isinstance(item, list) and len(item) == 2 and all(isinstance(text, str) for text in item):
        return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), item, strict=True)]
    if not isinstance(item, dict):
        raise DataError(f"turn {number} must be an object with `role` and `content`, but is {describe(item)}.")
    present = {name: value for name, value in item.items() if value is not None}
    if role_key := next((name for name in ROLE_KEYS if name in present), None):
        if not isinstance(present[role_key], str):
            raise DataError(f"`{role_key}` of turn {number} must be text, but is {describe(present[role_key])}.")
        content_key = next((name for name in CONTENT_KEYS if name in present), "content")
        standard = {role_key: "role", content_key: "content"}
        turn = {standard.get(name, name): value for name, value in present.items()}
        return [turn if "content" in turn else {**turn, "content": None}]
    for question, answer in PAIRS:
        if question in item and answer in item:
            others = {name: value for name, value in present.items() if name not in (question, answer)}
            asked: Turn = {"role": "user", "content": item[question]}
            return [asked, {**others, "role": "assistant", "content": item[answer]}]
    roles = [(entry.role, name) for name in present if (entry := find_role(name)) is not None and not entry.is_call]
    if not roles or len(roles) < len(present):
        raise DataError(
            f"turn {number} has no role; its keys are {quoted_list(item) or 'none'}. Turns have `role` and `content`, "
            "or `from` and `value`; convert others with a `template`."
        )
    roles.sort(key=lambda pair: STANDARD_ROLES.index(pair[0]))  # tables sort their columns: the question comes first
    return [{"role": role, "content": present[name]} for role, name in roles]


def _without_content(turn: Turn) -> dict[str, Any]:
    return {name: value for name, value in turn.items() if name not in ("content", "tool_calls")}


def _read_turn(number: int, turn: Turn, entry: RoleEntry | None, *, with_images: bool) -> list[Turn]:
    """Return the turn, and before it the results of tools among its parts as turns of their own."""
    role, content = turn["role"], turn["content"]
    is_word = _WORD.fullmatch(role) is not None
    if entry is not None and (entry.role != "tool" or not is_word):
        role = entry.role
    elif not is_word:
        raise DataError(f"`role` of turn {number} must be a plain word such as `user`, but is {role[:64]!r}.")
    present = {name: value for name, value in turn.items() if name not in ("tool_calls", "function_call")}
    parts = _Parts([], [], [], [])
    calls, wrapped = turn.get("tool_calls"), turn.get("function_call")
    if entry is not None and entry.is_call:
        content, wrapped = None, content
    if isinstance(content, list) and content:
        for part in content:
            parts.add(part, number=number, with_images=with_images)
    if calls and (wrapped or parts.calls):
        raise DataError(f"turn {number} has `tool_calls` and other tool calls. Remove one of them.")
    calls = _read_calls(number, calls) if calls is not None else list(parts.calls)
    if wrapped is not None:
        calls += [{"type": "function", "function": call} for call in _read_calls(number, wrapped, are_bare=True)]
    if calls or "tool_calls" in turn:
        present["tool_calls"] = [_with_parsed_arguments(number, call) for call in calls]
    if parts.reasoning:
        present["reasoning_content"] = "\n".join(parts.reasoning)
    others = {name: value for name, value in _without_content(present).items() if name != "role"}
    results: list[Turn] = [{**others, **result} for result in parts.results]
    if results and not parts.content:
        return results
    if parts.content:
        is_text = len(parts.content) == 1 and not is_image_part(parts.content[0])
        content = parts.content[0]["text"] if is_text else parts.content
    elif calls and not isinstance(content, str):
        content = None
    elif not isinstance(content, str):
        actual = "is missing or null" if content is None else f"is {describe(content)}"
        raise DataError(f"`content` of turn {number} must be text, but {actual}.")
    return [*results, {**present, "role": role, "content": content}]


def _read_calls(number: int, value: Any, *, are_bare: bool = False) -> list[Mapping[str, Any]]:
    """Return the tool calls of a list, an object or JSON text; bare ones have `name` and `arguments` on the outside."""
    try:
        calls = parse_row_json(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise DataError(f"turn {number} has a function call that is not JSON: {error.msg}.") from error
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"`tool_calls` of turn {number} must be a list of objects, but is {describe(calls)}.")
    if are_bare:
        calls = [call["function"] if isinstance(call.get("function"), dict) else call for call in calls]
        if not all("name" in call for call in calls):
            raise DataError(f"turn {number} is a function call, which must be JSON with `name` and `arguments`.")
    return calls


def _with_parsed_arguments(number: int, call: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_parsed_arguments(number, call["function"])}
    if not isinstance(call.get("arguments"), str):
        return call
    try:
        return {**call, "arguments": parse_row_json(call["arguments"] or "{}")}
    except json.JSONDecodeError as error:
        raise DataError(f"the arguments of a tool call in turn {number} are not JSON: {error.msg}.") from error


_SOURCES = ("image", "path", "url", "bytes", "base64", "image_url")
"""The keys of an image part that may contain the image."""


def _image_part(part: Mapping[str, Any]) -> Part:
    for name in _SOURCES:
        if part.get(name) is not None:
            source = part[name]
            nested = source.get("url") if name == "image_url" and isinstance(source, Mapping) else source
            return {"type": "image", "image": nested}
    index = part.get("index")
    return {"type": "image"} if index is None else {"type": "image", "index": index}


_TEXT_TYPES = (None, "text", "input_text", "output_text")
_CALL_PARTS = ("tool_use", "toolUse", "functionCall", "function_call")
_RESULT_PARTS = ("tool_result", "toolResult", "functionResponse", "function_response")
"""The names of tool calls and their results among the parts of Anthropic, Bedrock and Gemini."""


def _named_part(part: Any, names: Sequence[str]) -> Mapping[str, Any] | None:
    """Return the content of a part whose type, or key, is one of the names."""
    if not isinstance(part, Mapping) or part.get("type") in names:
        return part if isinstance(part, Mapping) else None
    return next((part[name] for name in names if isinstance(part.get(name), Mapping)), None)


def _text_of_part(part: Any) -> str | None:
    if isinstance(part, str) or not isinstance(part, Mapping):
        return part if isinstance(part, str) else None
    text = next((part[name] for name in ("text", "content") if part.get(name) is not None), None)
    return text if isinstance(text, str) and part.get("type") in _TEXT_TYPES else None


def _first(values: Mapping[str, Any], *names: str) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


@dataclass
class _Parts:
    """The parts of a turn's content, by what they mean."""

    content: list[Part]
    reasoning: list[str]
    calls: list[Mapping[str, Any]]
    results: list["Turn"]  # turns of their own in chat templates

    def add(self, part: Any, *, number: int, with_images: bool) -> None:
        """Add a part; raises DataError naming the turn for one that is not known."""
        text = _text_of_part(part)
        if text is not None:
            is_thought = isinstance(part, Mapping) and part.get("thought") is True  # Gemini
            self.reasoning.append(text) if is_thought else self.content.append({"type": "text", "text": text})
        elif is_image_part(part) and with_images:
            self.content.append(_image_part(part))
        elif (call := _named_part(part, _CALL_PARTS)) and isinstance(call.get("name"), str):
            function = {"name": call["name"], "arguments": _first(call, "input", "args", "arguments") or {}}
            self.calls.append({**_identity(call, "id"), "type": "function", "function": function})
        elif result := _named_part(part, _RESULT_PARTS):
            name = {"name": result["name"]} if result.get("name") else {}
            content = _result_content(_first(result, "content", "response"), number=number)
            self.results.append({"role": "tool", "content": content, **name, **_identity(result, "tool_call_id")})
        elif (thought := _named_part(part, ("thinking",))) and isinstance(thought.get("thinking"), str):
            self.reasoning.append(thought["thinking"])
        else:
            what = f"{describe(part)} as a part"
            if isinstance(part, Mapping):
                kind = part.get("type")
                what = f"a part of type {kind!r}" if kind else f"a part with the keys {quoted_list(part)}"
            known = "`text` and `image`" if with_images else "`text`"
            raise DataError(f"turn {number} has {what}. Supported here are {known}, tool calls and their results.")


def _identity(part: Mapping[str, Any], key: str) -> dict[str, Any]:
    identity = _first(part, "id", "toolUseId", "tool_use_id")
    return {} if identity is None else {key: identity}


def _result_content(value: Any, *, number: int) -> Any:
    """Return the result of a tool as text, or as several texts."""
    if isinstance(value, list):
        texts = [
            format_json(part["json"]) if isinstance(part, dict) and "json" in part else _text_of_part(part)
            for part in value
        ]
        if texts and None not in texts:
            return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    if value is None:
        raise DataError(f"turn {number} has the result of a tool without content.")
    return value if isinstance(value, str) else format_json(value)
