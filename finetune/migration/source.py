"""Reads a peer's config, YAML or JSON, as a flat table of its keys, each with its line and its plain value.

Empty values are `null`, as the peers read them, and aliases are expanded. `${key}` is replaced by the value of a key
of the same file, as OmegaConf does; environment variables and Jinja in values are refused, since their
values are not in the file.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.config.load import read_text_file
from finetune.config.section import join_key
from finetune.config.yaml import EMPTY, NOT_EXPANDED, invalid_characters, read_yaml
from finetune.errors import ConfigError, Problem, UserError
from finetune.runtime.text.redact import register_secrets

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_MAX_REFERENCES = 10
_MAX_TEXT = 100_000
_JINJA_KEYS = ("template", "jinja", "prompt", "format", "system")
"""Words in the name of a key whose text may be a template."""


@dataclass(frozen=True)
class Leaf:
    """A key of the file that holds a plain value: `datasets.0.path`, on this line."""

    key: str
    line: int | None
    value: Any

    @property
    def pattern(self) -> str:
        """Return the key with `[]` for every position: `datasets[].path`."""
        return re.sub(r"\.\d+(?=\.|$)", "[]", self.key)

    @property
    def position(self) -> int:
        """Return the first position in the key, 0 without one."""
        match = re.search(r"\.(\d+)(?=\.|$)", self.key)
        return int(match[1]) if match else 0


@dataclass(frozen=True)
class PeerFile:
    """A peer's config: its path, its values, and its leaves by dotted key."""

    path: Path
    values: Mapping[str, Any]
    leaves: Mapping[str, Leaf]
    text: str = ""


def read_peer_file(path: Path) -> PeerFile:
    """Return the keys of the file; raises UserError, or ConfigError with every problem and its line."""
    try:
        text = read_text_file(path)
    except OSError as error:
        reason = "it is a folder, not a file" if path.is_dir() else error.strerror or str(error)
        raise UserError(f"--from {path}: {reason}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--from {path}: the file is not UTF-8 text. Save it as UTF-8.") from error
    text = text.removeprefix("\ufeff")
    if text.lstrip().startswith("{") and "\n{%" not in text:
        text = text.replace("\t", " ")  # JSON, in which a tab stands only between values
    document = read_yaml(text)
    register_secrets(document.values)
    problems = [problem for problem in document.problems if problem.message not in (EMPTY, NOT_EXPANDED)]
    merges = ((key, line) for key, line in document.lines.items() if key.rpartition(".")[2] == "<<")
    problems += [Problem(key, "merge keys are not read. Write the merged keys out.", line=line) for key, line in merges]
    if problems:
        raise ConfigError(problems, path.name)
    if not isinstance(document.values, dict) or not document.values:
        raise UserError(f"--from {path}: the file has no keys. A config is a mapping of keys to values.")
    leaves = {leaf.key: leaf for leaf in _leaves(document.values, "", document.lines)}
    resolved, problems = {}, []
    for key, leaf in leaves.items():
        is_template = any(word in key.lower() for word in _JINJA_KEYS)
        try:
            resolved[key] = Leaf(key, leaf.line, _resolve(leaf.value, leaves, is_template=is_template))
        except ValueError as error:
            problems.append(Problem(key, str(error), line=leaf.line))
    if problems:
        raise ConfigError(problems, path.name)
    return PeerFile(path, document.values, resolved, text)


def is_present(path: Path, test: Callable[[Path], bool] = Path.is_file) -> bool:
    """Return whether there is such a file or folder; a text too long for a name is none."""
    try:
        return test(path)
    except OSError:
        return False


def _leaves(value: Any, key: str, lines: Mapping[str, int]) -> Iterator[Leaf]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, join_key(key, name), lines)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, join_key(key, index), lines)
    else:
        yield Leaf(key, lines.get(key), value)


def _resolve(value: Any, leaves: Mapping[str, Leaf], *, is_template: bool) -> Any:
    if isinstance(value, list):
        return [_resolve(item, leaves, is_template=is_template) for item in value]
    if not isinstance(value, str):
        return value
    for _ in range(_MAX_REFERENCES):
        match = _REFERENCE.search(value)
        if match is None:
            break
        target = leaves.get(match[1])
        if target is None:
            raise ValueError(
                f"`{match[0][:60]}` is not another key of this file. Environment variables and resolvers are not "
                "expanded: write the value itself."
            )
        if value == match[0] and not isinstance(target.value, str):
            return target.value
        value = value.replace(match[0], str(target.value))
        if len(value) > _MAX_TEXT:
            raise ValueError("its references expand to too much text. Write the value itself.")
    if "${" in value:
        raise ValueError("its references do not end, or are not closed. Write the value itself.")
    if not is_template and ("{{" in value or "{%" in value):
        raise ValueError("Jinja in a value is not expanded. Write the value itself.")
    if fault := invalid_characters(value):
        raise ValueError(fault)
    return value
