"""The peers' tables: what becomes of each of their keys, and how its value is converted."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML

Convert = Callable[[Any], Any]
Kind = Literal["key", "fact", "not_needed", "not_possible"]


class NoCounterpart(Exception):
    """Raised by a converter for a value that a job cannot express; its text is what to do instead."""


@dataclass(frozen=True)
class Rule:
    """The rule for a key: `name` is our key, or a fact that completes the job; `why` the reason that it has none."""

    kind: Kind
    name: str = ""
    why: str = ""
    convert: Convert = lambda value: value


Table = Mapping[str, Rule]
"""From the peer's keys, with `[]` for positions; `section.*` stands for every key in a section that is not listed."""


QAT = "quantization-aware training has no counterpart: train in bf16, then quantize the export."
_TABLES = Path(__file__).parent / "tables"


def is_off(value: Any) -> bool:
    """Return whether a value switches off: null, false, 0, an empty text, list or section, or a word such as `none`."""
    if isinstance(value, str):
        return value.strip().lower() in ("", "no", "none", "off", "false", "null")
    return value in (None, False, 0, [], {})


def truth(value: Any) -> bool:
    """Return a truth value, also of the words that YAML 1.1 reads as one; `auto` is true."""
    words = {"true": True, "yes": True, "on": True, "auto": True, "false": False, "no": False, "off": False}
    found = words.get(str(value).lower(), {0: False, 1: True}.get(value) if isinstance(value, int) else None)
    if found is None:
        raise NoCounterpart("this is not `true` or `false`. Correct it and run this again.")
    return found


def number(value: Any) -> float:
    """Return a number, also of a text such as `1e-4`, which YAML 1.1 does not read as one."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        raise NoCounterpart("this is not a number. Correct it and run this again.") from None
    if isinstance(value, bool) or result != result or abs(result) == float("inf"):
        raise NoCounterpart("this is not a finite number. Correct it and run this again.")
    return result


def whole(value: Any) -> int:
    """Return a whole number."""
    result = number(value)
    if result != int(result):
        raise NoCounterpart("this is not a whole number. Correct it and run this again.")
    return int(result)


def positive(value: Any) -> int:
    """Return a whole number of at least 1."""
    if (result := whole(value)) < 1:
        raise NoCounterpart("this is not at least 1. Correct it and run this again.")
    return result


def text(value: Any) -> str:
    """Return a text."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise NoCounterpart("this is not a text. Correct it and run this again.")
    return str(value)


def words(value: Any) -> list[str]:
    """Return a list of texts, also of a text with commas or blanks between them."""
    if isinstance(value, str):
        return [part for part in re.split(r"[,\s]+", value) if part]
    if not isinstance(value, list):
        raise NoCounterpart("this is not a list of texts. Correct it and run this again.")
    return [text(item) for item in value]


def optional_number(value: Any) -> float | None:
    """Return a number, or None for a word that switches off."""
    return None if is_off(value) and not isinstance(value, int | float) else number(value)


def numbers(value: Any) -> list[float]:
    """Return a list of numbers, also of a text with commas or blanks between them."""
    if not isinstance(value, list | str):
        raise NoCounterpart("this is not a list of numbers. Correct it and run this again.")
    return [number(item) for item in (words(value) if isinstance(value, str) else value)]


def first(value: Any) -> str:
    """Return a text, or the only one of a list; several files are a glob."""
    names = words(value)
    if len(names) != 1:
        raise NoCounterpart("write one path or a glob, such as `rows/*.jsonl`.")
    return names[0]


def word(value: Any) -> str:
    """Return a word in small letters, also of a member of an enumeration: `epoch` for `IntervalStrategy.EPOCH`."""
    return text(value).rpartition(".")[2].lower()


def revision(value: Any) -> str | None:
    """Return a revision, None for the main branch."""
    return None if value == "main" else text(value)


def side(value: Any) -> str:
    """Return the side of a row that is cut off."""
    return "start" if value in ("left", "keep_end") else "end"


def negated(value: Any) -> bool:
    """Return the opposite of a truth value."""
    return not truth(value)


def unless_auto(value: Any) -> Any:
    """Return a truth value, or `auto`."""
    return "auto" if value == "auto" else truth(value)


def switches(value: Any) -> str:
    """Return the switches of FSDP as text, empty if it is off."""
    return "" if is_off(value) else str(value)


def component(value: Any) -> str:
    """Return the dotted name of a class or a function."""
    written = text(value)
    if not re.fullmatch(r"[\w.]+", written):
        raise NoCounterpart("this is not the dotted name of a class or a function.")
    return written


def component_name(value: Any) -> str:
    """Return the name of a class or a function without its module."""
    return component(value).rpartition(".")[2]


def modules(value: Any) -> list[str] | str:
    """Return the modules of adapters: names, `all-linear`, or the names at the end of a regular expression."""
    if isinstance(value, str) and value.lower() in ("all", "all-linear"):
        return "all-linear"
    if isinstance(value, str) and re.search(r"[\\()|*\[]", value):
        match = re.search(r"\(([\w|]+)\)(_\w+)?$", value)
        if match is None:
            raise NoCounterpart("a regular expression: write the names of the modules in `model.lora.target_modules`.")
        return [f"{name}{match[2] or ''}" for name in match[1].split("|")]
    names = words(value)
    return "all-linear" if names in (["all"], ["all-linear"]) else names


def path(value: Any) -> str:
    """Return a path such that a job reads it as one: `./folder` for `folder`."""
    written = text(value)
    return written if written.startswith((".", "/", "~")) or "://" in written else f"./{written}"


def address(value: Any) -> str:
    """Return the address of a host."""
    return "127.0.0.1" if value == "localhost" else text(value)


def _words_of(values: Mapping[Any, str]) -> Convert:
    """Return a converter of the words that a section of values.yaml lists, whatever their case."""
    choices = {word: ours for ours, theirs in values.items() if ours != "instead" for word in theirs.split()}

    def convert(value: Any) -> Any:
        word = str(value).lower() or "none"
        if word not in choices:
            raise NoCounterpart(values["instead"])
        return choices[word]

    return convert


_VALUES: Mapping[str, Mapping[Any, str]] = YAML(typ="safe").load(_TABLES / "values.yaml")
_CHOICES = {name: _words_of(values) for name, values in _VALUES.items()}


def component_optimizer(value: Any) -> str:
    """Return the optimizer of a class by its dotted name."""
    found: str = _CHOICES["optimizer"](component(value).rpartition(".")[2].lower())
    return found


_FUNCTIONS: tuple[Convert, ...] = (
    *(truth, unless_auto, negated, number, numbers, optional_number, whole, positive, text, words, word, first),
    *(component, component_name, component_optimizer, modules, path, address, revision, side, switches),
)
TRANSFORMS: Mapping[str, Convert] = {**_CHOICES, **{function.__name__: function for function in _FUNCTIONS}}
"""The functions above, and the words of values.yaml, by the names that the tables call them."""


@dataclass(frozen=True)
class Header:
    """Facts about a peer: keys that only it has, the packages with its keys, groups of defaults."""

    title: str
    signs: frozenset[str]
    packages: tuple[str, ...]
    defaults: tuple[str, ...]


@cache
def read_file(name: str) -> dict[str, Any]:
    """Return the file of a peer as plain values."""
    sections: dict[str, Any] = YAML(typ="safe").load(_TABLES / f"{name}.yaml")
    return sections


def read_header(name: str) -> Header:
    """Return what the file of a peer says of the peer itself."""
    file = read_file(name)
    signs, packages = frozenset(file["signs"].split()), tuple(file["packages"].split())
    return Header(file["title"], signs, packages, tuple(file["defaults"]))


@cache
def read_key_table(name: str) -> Table:
    """Return the table of a peer from its file, which extends the one that it names as `base`.

    A line of `keys` and `facts` is `theirs: ours transform`, one of the other sections a reason and the keys with it.
    """
    sections = read_file(name)
    table = dict(read_key_table(sections["base"])) if "base" in sections else {}
    names: tuple[tuple[Kind, str], ...] = (("key", "keys"), ("fact", "facts"))
    for kind, section in names:
        for theirs, written in sections[section].items():
            ours, _, transform = written.partition(" ")
            table[theirs] = Rule(kind, ours, convert=_transform(transform))
    reasons: tuple[Kind, ...] = ("not_needed", "not_possible")
    for kind in reasons:
        for why, keys in sections[kind].items():
            table |= dict.fromkeys(keys.split(), Rule(kind, why=why))
    return table


def _transform(written: str) -> Convert:
    """Return the transform of this name; `flag:sdpa` is a switch that stands for `sdpa` when it is on."""
    name, _, value = written.partition(":")
    if name == "flag":
        return lambda switch: value if truth(switch) else "auto"
    return TRANSFORMS[name] if name else lambda anything: anything
