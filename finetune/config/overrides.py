"""`--set train.learning_rate=1e-4`: values from the command line that override the file's."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from finetune.config.formatting import escape_variables, truncate
from finetune.config.section import KeyLocation, expand_names
from finetune.config.yaml import MAX_DEPTH, MAX_KEY_LENGTH, invalid_characters, read_yaml
from finetune.errors import Problem
from finetune.runtime.text.redact import redacted_command
from finetune.runtime.text.terminal import format_json


@dataclass
class OverrideResult:
    """The values after all overrides, the location of every key that an override set, and the problems."""

    values: dict[str, Any]
    sources: dict[str, KeyLocation] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)  # keys whose old value, with everything inside it, was replaced


_MAX_SHOWN_CHARACTERS = 200
"""Maximum number of characters of an override in a message."""

_INDEX_DIGITS = 9
"""Digits of a list index; no list in a job is longer."""


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> OverrideResult:
    """Return the values with each `key=value` applied in order; missing sections are created.

    The value is read as YAML 1.2, so `null`, `[1, 2]` and `{a: 1}` work. The argument is not changed.
    """
    result = OverrideResult(copy.deepcopy(values))
    for text in overrides:
        key, equals, written = text.partition("=")
        source = KeyLocation(override_label(text))
        fault = invalid_characters(key)
        if not equals:
            fault = "`=` is missing. Write it as `--set train.steps=100`."
        elif not all(part and part == part.strip() for part in key.split(".")):
            fault = "the key is not a dotted name. Write it as `--set train.steps=100`."
        elif len(key) > MAX_KEY_LENGTH or key.count(".") >= MAX_DEPTH:
            fault = f"the key is too long: it has {key.count('.') + 1} parts and {len(key):,} characters."
        elif fault is None and not written.strip():
            fault = f"there is no value after `=`. Write a value, or `{key}=null` for none."
        if fault is not None:
            result.problems.append(Problem("", fault, source=source.where))
            continue
        document = read_yaml(written)
        if document.problems:
            result.problems += [
                replace(problem, key=key, line=None, source=source.where) for problem in document.problems
            ]
            continue
        _assign(result, key, value=document.values, source=source)
        expand_names(result.values, result.sources)
    return result


def override_text(key: str, value: Any) -> str:
    """Return the override that gives the key this plain value.

    >>> override_text("train.learning_rate", 1e-4), override_text("model.lora", {"rank": 8})
    ('train.learning_rate=0.0001', 'model.lora={"rank": 8}')
    """
    return f"{key}={escape_variables(format_json(value))}"


def override_label(override: str) -> str:
    """Return how messages name the override: as it was typed, without secrets, truncated if it is long."""
    return f"--set {truncate(redacted_command([override])[0], most=_MAX_SHOWN_CHARACTERS)}"


def _assign(result: OverrideResult, key: str, *, value: Any, source: KeyLocation) -> None:
    """Set the value at the dotted key, creating missing sections."""
    *sections, name = key.split(".")
    container: Any = result.values
    path: list[str] = []
    for part in sections:
        path.append(part)
        inner = _child(container, part)
        if inner is None and isinstance(container, dict):
            inner = container[part] = {}
            result.sources[".".join(path)] = source
        if not isinstance(inner, dict | list):
            message = f"`{'.'.join(path)}` is a single value and has no keys."
            result.problems.append(Problem(key, message, source=source.where))
            return
        container = inner
    if isinstance(container, dict):
        container[name] = value
    elif _child(container, name) is not None:
        container[int(name)] = value
    else:
        message = f"`{'.'.join(path)}` is a list with items 0 to {len(container) - 1}. Write one of these."
        result.problems.append(Problem(key, message, source=source.where))
        return
    result.replaced.append(key)
    below = f"{key}."
    for stale in [other for other in result.sources if other.startswith(below)]:
        del result.sources[stale]
    _record_location(result.sources, key, value=value, source=source)


def _child(container: Any, part: str) -> Any:
    if isinstance(container, dict):
        return container.get(part)
    is_index = part.isdecimal() and len(part) <= _INDEX_DIGITS and int(part) < len(container)
    return container[int(part)] if is_index else None


def _record_location(sources: dict[str, KeyLocation], key: str, *, value: Any, source: KeyLocation) -> None:
    sources[key] = source
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        _record_location(sources, f"{key}.{name}", value=inner, source=source)
