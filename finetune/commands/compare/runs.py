"""The runs of a comparison as read from their folders, and differences between their configs and environments."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.report.history import RunHistory
from finetune.report.page.facts import RunFiles, config_lines


@dataclass(frozen=True)
class ComparedRun:
    """One run."""

    name: str
    folder: Path
    history: RunHistory
    files: RunFiles


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that are unique; equal paths are numbered.

    >>> short_names([Path("/runs/a/first"), Path("/runs/b/first")])
    ['a/first', 'b/first']
    """
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path_parts[-count:]) for path_parts in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path_parts[-1]} ({number})" for number, path_parts in enumerate(parts, start=1)]


ABSENT = "-"
_PROCESS_VARIABLES = re.compile(r"launcher\.((LOCAL_|GROUP_|ROLE_)?RANK|MASTER_\w+|TORCHELASTIC_\w+)")
"""Variables that identify a process or a launch, without effect on the run."""


@dataclass(frozen=True)
class Difference:
    """A key whose value is not the same in all runs: a text for each run, with its source if one is known."""

    key: str
    values: tuple[str, ...]


def config_differences(runs: Sequence[ComparedRun]) -> list[Difference]:
    """Return the keys of resolved.yaml that differ, each value with its source; the run's own folder is left out."""
    configs = [dict(_config_values(run.files.config)) for run in runs]
    plain = [{key: value for key, (value, _) in config.items()} for config in configs]
    sourced = [
        {key: f"{value}  ({source})" if source else value for key, (value, source) in config.items()}
        for config in configs
    ]
    return [
        Difference(key, tuple(config.get(key, ABSENT) for config in sourced))
        for key in _differing(plain)
        if key != "run.folder"
    ]


def environment_differences(runs: Sequence[ComparedRun]) -> list[Difference]:
    """Return the facts of environment.json that differ."""
    environments = [dict(_flat(run.files.environment)) for run in runs]
    return [
        Difference(key, tuple(environment.get(key, ABSENT) for environment in environments))
        for key in _differing(environments)
    ]


def _differing(values: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys, in their order, whose values differ; runs without any, whose file is missing, do not count."""
    known = [run for run in values if run]
    keys = dict.fromkeys(key for run in known for key in run)
    return [key for key in keys if len({run.get(key) for run in known}) > 1]


def _config_values(text: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield dotted keys with value and source; keys without effect are comments and left out."""
    path: list[str] = []
    for line in config_lines(text):
        name, colon, value = line.text.strip().partition(":")
        if not colon or name.startswith("#"):
            continue
        depth = (len(line.text) - len(line.text.lstrip())) // 2
        path = [*path[:depth], name]
        if value.strip():
            yield ".".join(path), (value.strip(), line.source)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(item, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            yield from _flat(item, f"{prefix}[{number}]")
    elif value is not None and not _PROCESS_VARIABLES.fullmatch(prefix):
        yield prefix, " ".join(map(str, value)) if isinstance(value, list) else str(value)
