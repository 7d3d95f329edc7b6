"""Kinds of values of a column: the tests by which layouts tell columns of one name apart."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from finetune.data.features import result_or_error
from finetune.data.formats.spans import read_span
from finetune.data.images import looks_like_images
from finetune.data.turns import turn_keys
from finetune.registry.layouts import Speakers, shipped_layouts
from finetune.registry.turns import WEIGHTS

_KIND = re.compile(r"(?P<name>\w+)(?:\((?P<keys>[\w,]+)\))?")
_MAX_CLASS = 60
"""Characters of the longest text that is a class."""


def parsed_value(value: Any) -> Any:
    """Return the value of JSON text that holds a list or an object; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return re.fullmatch(r"[-+]?\d*\.?\d+(e[-+]?\d+)?", value.strip(), re.IGNORECASE) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) and str(value).lower() in (
        "true",
        "false",
        "0",
        "1",
        "0.0",
        "1.0",
    )


def _is_class(value: Any) -> bool:
    is_name = isinstance(value, str) and len(value) <= _MAX_CLASS and "\n" not in value and bool(value.strip())
    return is_name or isinstance(value, bool) or _is_integer(value)


def _list_of(test: Callable[[Any], bool], *, least: int = 0) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(items := parsed_value(value), list | tuple) and len(items) >= least and all(map(test, items))
    )


def is_text(value: Any) -> bool:
    """Return whether the value is text."""
    return isinstance(value, str)


def _is_turn(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(turn_keys(value))


def _has_keys(value: Any, keys: Sequence[str]) -> bool:
    return isinstance(value, Mapping) and all(key in value for key in keys)


def _is_language(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 1
        and all(re.fullmatch(r"[a-z]{2,3}([_-]\w{2,4})?", str(name)) and is_text(text) for name, text in value.items())
    )


def speakers_of(texts: Sequence[Any]) -> Speakers | None:
    """Return the marks of the speakers that stand in all of the texts, user before assistant."""
    for speakers in shipped_layouts().transcripts:
        if texts and all(
            is_text(text) and -1 < text.find(speakers.user) < text.rfind(speakers.assistant) for text in texts
        ):
            return speakers
    return None


KINDS: Mapping[str, Callable[[Any], bool]] = {
    "any": lambda value: True,
    "text": is_text,
    "number": _is_number,
    "share": lambda value: _is_number(value) and 0 <= (float(value) if isinstance(value, str) else value) <= 1,
    "integer": _is_integer,
    "digits": lambda value: isinstance(value, str) and value.strip().isdecimal(),
    "index": lambda value: str(value).lower() in ("0", "1", "true", "false"),
    "flag": _is_flag,
    "letter": lambda value: isinstance(value, str) and re.fullmatch(r"\s*[A-La-l]\s*", value) is not None,
    "class": _is_class,
    "classes": _list_of(_is_class),
    "flags": _list_of(_is_flag),
    "integers": _list_of(_is_integer),
    "texts": _list_of(is_text, least=1),
    "several_texts": _list_of(is_text, least=2),
    "words": _list_of(is_text),
    "tags": _list_of(lambda tag: tag is None or _is_class(tag)),
    "pairs": _list_of(_list_of(is_text, least=2)),
    "turn": _is_turn,
    "turns": _list_of(_is_turn, least=1),
    "tools": _list_of(lambda tool: isinstance(tool, Mapping)),
    "calls": _list_of(lambda call: _has_keys(call, ("name",)), least=1),
    "spans": _list_of(lambda span: isinstance(result_or_error(read_span, 1, span), tuple)),
    "image": looks_like_images,
    "images": _list_of(looks_like_images),
    "answer": lambda value: text_of_values([value]) is not None,
    "languages": _is_language,
    "transcript": lambda value: speakers_of([value]) is not None,
}
"""The tests of one value by kind; `object`, `objects` and a few others look at keys or at several rows."""


def value_test(kind: str, values: Sequence[Any]) -> Callable[[Any], bool]:
    """Return the test of the kind's values, in a column with these values."""
    match = _KIND.fullmatch(kind)
    assert match is not None, kind
    name, keys = match["name"], (match["keys"] or "").split(",")
    if name == "object":
        return lambda value: _has_keys(parsed_value(value), keys)
    if name == "objects":
        return _list_of(lambda item: _has_keys(item, keys), least=1)
    if name == "weighted_turns":
        turns = [turn for value in values if KINDS["turns"](value) for turn in parsed_value(value)]
        is_weighted = any(turn.get(name) is not None for turn in turns for name in WEIGHTS)
        return KINDS["turns"] if is_weighted else lambda value: False
    if name == "transcript" and speakers_of(values) is None:
        return lambda value: False
    if name == "joined":
        return is_text if any(is_text(value) and "|" in value for value in values) else lambda value: False
    if name == "prose":
        return is_text if is_prose(values) else lambda value: False
    return KINDS[name]


def is_prose(values: Sequence[Any]) -> bool:
    """Return whether most of the values are different texts of several words."""
    words = [value for value in values if is_text(value) and " " in value.strip()]
    return len(words) > len(values) / 2 and len(set(words)) > len(words) / 2


_TEXTS_OF_VALUES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (is_text, "{}"),
    (lambda value: isinstance(value, bool), "{{ 'yes' if {} else 'no' }}"),
    (_is_number, "{{ {} }}"),
    (_list_of(is_text), "{{ {}[0] if {} else '' }}"),
    (lambda value: _has_keys(value, ("text",)) and isinstance(value["text"], list), "{{ {}.text[0] if {}.text else "
     "'unanswerable' }}"),
    (lambda value: _has_keys(value, ("value",)), "{{ {}.value }}"),
    (lambda value: _has_keys(value, ("en",)), "{{ {}.en }}"),
)  # fmt: skip
"""For a kind of answer, its text: `{}` is the column."""


def text_of_values(values: Sequence[Any]) -> str | None:
    """Return how the text of these answers is written, `{}` for the column itself; None where there is no such way."""
    for test, text in _TEXTS_OF_VALUES:
        if values and all(map(test, values)):
            return text
    return None


def is_empty(value: Any) -> bool:
    """Return whether the value is null, blank text, or an empty list or object."""
    return (
        not value.strip()
        if isinstance(value, str)
        else value is None or (isinstance(value, list | tuple | Mapping) and not value)
    )
