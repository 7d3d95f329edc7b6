"""The peers' tables: what becomes of each of their keys, and how its value is converted."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import FiniteFloat, PositiveInt, TypeAdapter
from ruamel.yaml import YAML

Convert = Callable[[Any], Any]
Kind = Literal["key", "fact", "not_needed", "not_possible"]

_TABLES = Path(__file__).parent / "tables"
_DEFAULTS = Path(__file__).with_name("defaults.json")


class NoCounterpart(Exception):
    """Raised by a converter for a value that a job cannot express; its text is what to do instead."""


@dataclass(frozen=True)
class Rule:
    """The rule for a key: `name` is our key, or a fact that completes the job; `why` the reason that it has none."""

    kind: Kind
    name: str = ""
    why: str = ""
    convert: Convert = lambda value: value


@dataclass(frozen=True)
class PeerTable:
    """The file of a peer: what tells its configs from others', where its defaults are, and a rule for each key.

    Keys have `[]` for positions; `section.*` stands for every key in a section that is not listed.
    """

    title: str
    signs: frozenset[str]  # keys that only it has
    packages: tuple[str, ...]
    defaults: tuple[str, ...]  # groups of defaults.json
    rules: Mapping[str, Rule]
    left_over: Mapping[str, str]  # why a fact that no key was written from is not needed

    @property
    def known_keys(self) -> frozenset[str]:
        """Return all keys of the peer: from the table and from its packages."""
        groups = read_defaults()["defaults"]
        named = [group for group in groups if group.partition(" ")[0] in self.packages and " _" not in group]
        own = {key for group in named for key in groups[group]}
        return frozenset(own | {key for key in self.rules if not key.endswith(".*")})

    def find(self, pattern: str) -> Rule | None:
        """Return the rule of a key, or that of the nearest section in it with a rule for all of its keys."""
        if pattern in self.rules:
            return self.rules[pattern]
        if any(key.startswith((f"{pattern}.", f"{pattern}[]")) for key in self.rules):
            return Rule("not_needed", why="nothing is set in it")
        parts = pattern.split(".")
        sections = (f"{'.'.join(parts[:length])}.*" for length in range(len(parts) - 1, 0, -1))
        return next((self.rules[section] for section in sections if section in self.rules), None)


@cache
def read_file(name: str) -> dict[str, Any]:
    """Return the file of a peer as plain values."""
    sections: dict[str, Any] = YAML(typ="safe").load(_TABLES / f"{name}.yaml")
    return sections


@cache
def read_table(name: str) -> PeerTable:
    """Return the table of a peer from its file, which extends the one that it names as `base`.

    A line of `keys` and `facts` is `theirs: ours transform`, one of the other sections a reason and the keys with it.
    """
    file = read_file(name)
    base = read_table(file["base"]) if "base" in file else None
    rules: dict[str, Rule] = {**base.rules} if base else {}
    names: tuple[tuple[Kind, str], ...] = (("key", "keys"), ("fact", "facts"))
    for kind, section in names:
        for theirs, written in file[section].items():
            ours, _, transform = written.partition(" ")
            rules[theirs] = Rule(kind, ours, convert=_transform(transform))
    reasons: tuple[Kind, ...] = ("not_needed", "not_possible")
    for kind in reasons:
        for why, keys in file[kind].items():
            rules |= dict.fromkeys(keys.split(), Rule(kind, why=why))
    left_over = dict(base.left_over) if base else by_name(read_file("left_over"))
    left_over |= by_name(file["left_over"])
    signs, packages = frozenset(file["signs"].split()), tuple(file["packages"].split())
    return PeerTable(file["title"], signs, packages, tuple(file["defaults"]), rules, left_over)


def by_name(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reason of each name in a section from reasons to names."""
    return {name: why for why, names in reasons.items() for name in names.split()}


def _transform(written: str) -> Convert:
    """Return the transform of this name; `flag:sdpa` is a switch that stands for `sdpa` when it is on."""
    name, _, value = written.partition(":")
    if name == "flag":
        return lambda switch: value if truth(switch) else "auto"
    return TRANSFORMS[name] if name else lambda anything: anything


ONLINE = "reinforcement learning is not a task here: use the Session API (docs/how-to/session.md)."
OWN_LOSS = "a plugin adds a loss of tokens as `task.loss` (docs/how-to/plugins.md)."
OUT_OF_SCOPE = {
    ONLINE: "reinforcement learning",
    OWN_LOSS: "a loss of its own",
    "quantization-aware training has no counterpart: train in bf16, then quantize the export.": "QAT",
    "diffusion is not a task here; `task.name: masked_lm` is nearest.": "a diffusion language model",
}
"""Reasons of keys that are not possible because the objective of the file does not exist here, and its name."""


@cache
def read_defaults() -> dict[str, dict[str, Any]]:
    """Return `versions` of the peers' packages, and `defaults` of their keys by group.

    `benchmarks/peer_defaults.py` reads them from the packages.
    """
    found: dict[str, dict[str, Any]] = json.loads(_DEFAULTS.read_text(encoding="utf-8"))
    return found


def is_off(value: Any) -> bool:
    """Return whether a value switches off: null, false, 0, an empty text, list or section, or a word such as `none`."""
    if isinstance(value, str):
        return value.strip().lower() in ("", "no", "none", "off", "false", "null")
    return value in (None, False, 0, [], {})


def _typed(kind: Any, what: str) -> Convert:
    """Return a converter to a type, also of a text such as `1e-4`, which YAML 1.1 does not read as a number."""
    adapter = TypeAdapter(kind)

    def convert(value: Any) -> Any:
        try:
            if isinstance(value, bool) and kind is not bool:
                raise ValueError
            return adapter.validate_python(value)
        except ValueError:
            raise NoCounterpart(f"this is not {what}. Correct it and run this again.") from None

    return convert


number = _typed(FiniteFloat, "a finite number")
whole = _typed(int, "a whole number")
positive = _typed(PositiveInt, "a whole number of at least 1")
_boolean = _typed(bool, "`true` or `false`")


def truth(value: Any) -> bool:
    """Return a truth value, also of the words that YAML 1.1 reads as one; `auto` is true."""
    return value == "auto" or bool(_boolean(value))


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


def numbers(value: Any) -> list[float]:
    """Return a list of numbers, also of a text with commas or blanks between them."""
    return [number(item) for item in words(value)]


def optional_number(value: Any) -> float | None:
    """Return a number, or None for a word that switches off."""
    return None if is_off(value) and not isinstance(value, int | float) else float(number(value))


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


def negated(value: Any) -> bool:
    """Return the opposite of a truth value."""
    return not truth(value)


def unless_auto(value: Any) -> Any:
    """Return a truth value, or `auto`."""
    return "auto" if value == "auto" else truth(value)


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


def _words_of(values: Mapping[Any, str]) -> Convert:
    """Return a converter of the words that a section of values.yaml lists, whatever their case and module."""
    choices = {word: ours for ours, theirs in values.items() if ours != "instead" for word in theirs.split()}

    def convert(value: Any) -> Any:
        word = str(value).rpartition(".")[2].lower() or "none"
        if word not in choices:
            raise NoCounterpart(values["instead"])
        return choices[word]

    return convert


_VALUES: Mapping[str, Mapping[Any, str]] = YAML(typ="safe").load(_TABLES / "values.yaml")


_FUNCTIONS: tuple[Convert, ...] = (
    *(truth, unless_auto, negated, numbers, optional_number, text, words, word, first),
    *(component, component_name, modules, path, revision),
)
TRANSFORMS: Mapping[str, Convert] = {
    **{name: _words_of(values) for name, values in _VALUES.items()},
    **{function.__name__: function for function in _FUNCTIONS},
    **{"number": number, "whole": whole, "positive": positive},
}
"""The functions above, and the words of values.yaml, by the names that the tables call them."""
