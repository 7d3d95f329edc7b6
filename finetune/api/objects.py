"""Rows, models and tokenizers that stand in a job as objects: found, and replaced by the paths of their files."""

import numbers
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from finetune.config.limits import invalid_characters
from finetune.config.section import Section, join_key
from finetune.errors import Problem

_ROWS = re.compile(r"data\.(train|validation)(\.mix\.\d+)?(\.path)?")
_PRETRAINED = re.compile(r"model(\.tokenizer)?(\.name)?")
"""Keys at which an object may stand in place of a name, a path or a section with one."""

_PENDING = "/given-in-python"
"""The folder of paths whose files are not written yet."""

PENDING_FOLDERS = (_PENDING,)


def take_objects(value: Any, *, key: str = "") -> tuple[Any, dict[str, Any], list[Problem]]:
    """Return the value as plain YAML values, the objects in it by dotted key, and a problem for each unusable value.

    An object is replaced by a path that does not exist; `with_paths` replaces it by the path of its file.
    """
    objects: dict[str, Any] = {}
    problems: list[Problem] = []
    return _plain(value, key, objects=objects, problems=problems), objects, problems


def with_paths(value: Any, paths: Mapping[str, str]) -> Any:
    """Return plain values with the paths of written objects, by the dotted key of each."""
    if isinstance(value, dict):
        return {name: with_paths(inner, paths) for name, inner in value.items()}
    if isinstance(value, list):
        return [with_paths(inner, paths) for inner in value]
    if isinstance(value, str) and value.startswith(f"{_PENDING}/"):
        return paths[value.removeprefix(f"{_PENDING}/").rpartition(".")[0]]
    return value


def _plain(value: Any, key: str, *, objects: dict[str, Any], problems: list[Problem]) -> Any:
    if is_object(key, value):
        objects[key] = value
        path = f"{_PENDING}/{key}.{'jsonl' if _ROWS.fullmatch(key) else 'model'}"
        return {"path": path} if _ROWS.fullmatch(key) and not key.endswith(".path") else path
    if isinstance(value, Section):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return {
            str(name): _plain(inner, join_key(key, str(name)), objects=objects, problems=problems)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            _plain(inner, join_key(key, number), objects=objects, problems=problems)
            for number, inner in enumerate(value)
        ]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, numbers.Number) and not isinstance(value, bool | int | float) and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, str) and (fault := invalid_characters(value)) is not None:
        problems.append(Problem(key, fault))
    elif not isinstance(value, str | bool | int | float | None):
        problems.append(Problem(key, f"an object of type `{type(value).__name__}` cannot stand here. {_advice(key)}"))
    return value


def is_object(key: str, value: Any) -> bool:
    """Return whether the value at the dotted key is rows, a model or a tokenizer rather than a value of YAML."""
    if isinstance(value, str | bytes | os.PathLike | Section | None):
        return False
    if _PRETRAINED.fullmatch(key):
        return hasattr(value, "save_pretrained")
    if not _ROWS.fullmatch(key) or (isinstance(value, Mapping) and not hasattr(value, "num_rows")):
        return False
    return isinstance(value, Iterable) or callable(value)


def _advice(key: str) -> str:
    if _ROWS.fullmatch(key):
        return "Rows are a `datasets.Dataset`, an iterable of dicts or a function that returns one."
    if _PRETRAINED.fullmatch(key):
        return "Write a name or a path, or an object with `save_pretrained`."
    return "Write text, a number, true or false, a list or a section."
