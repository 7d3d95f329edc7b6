"""From a job YAML and its overrides to a RunConfig, or to everything that is wrong with them at once."""

import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from finetune.config.draft import draft
from finetune.config.faults import Fault, read_faults
from finetune.config.overrides import named, override
from finetune.config.paths import with_absolute_paths
from finetune.config.rules import broken_rules
from finetune.config.rules.files import file_problems
from finetune.config.run_config import RunConfig, world_problems
from finetune.config.source import Source, Sources, placed
from finetune.config.wording import listed, nearest
from finetune.config.yaml import Document, read_yaml
from finetune.errors import ConfigError, Problem
from finetune.runtime.redact import remember_secrets


@dataclass(frozen=True)
class LoadedConfig:
    """A config that keeps every rule, with the file's text as it was written and the source of every written key.

    All paths in `config` are absolute. Once a run at a URL is staged, `run.folder` in `config` is the stage, and
    `remote` is the URL.
    """

    config: RunConfig
    path: pathlib.Path
    text: str
    sources: Sources
    remote: str | None = None


def load_config(path: pathlib.Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Return the config in the file with the overrides (`train.steps=4`) laid over it.

    Relative paths, those in overrides too, are resolved against the file's folder. Raises ConfigError with all
    problems at once.
    """
    text = _read(path)
    document = read_yaml(text)
    if not isinstance(document.values, dict):
        raise ConfigError(document.problems or [_not_a_job(document)], path.name)
    overridden = override(document.values, overrides)
    remember_secrets(overridden.values)
    sources = _sources(document, overridden.replaced, name=path.name) | overridden.sources
    problems = _still_there(document.problems, overridden.replaced) + overridden.problems
    folder = path.absolute().parent.resolve()
    config, found = _checked(overridden.values, folder=folder, broken={problem.key for problem in problems})
    problems += found
    if problems:
        raise ConfigError(_in_order(problems, sources, overrides=overrides), path.name)
    return LoadedConfig(config, path, text, sources)


def require_shareable(loaded: LoadedConfig, *, num_processes: int) -> None:
    """Raise ConfigError when so many processes cannot share the global batch."""
    problems = world_problems(loaded.config, num_processes=num_processes, sources=loaded.sources)
    if problems:
        raise ConfigError(problems, loaded.path.name)


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        fault = f"there is no such file. {_nearby(path)}"
    except IsADirectoryError:
        fault = "this is a folder. Name the job file in it."
    except UnicodeDecodeError as error:
        fault = f"this is not UTF-8 text (byte {error.start}). Save the file as UTF-8."
    except OSError as error:
        fault = f"it cannot be read: {error.strerror}."
    raise ConfigError([Problem("", fault)], str(path))


def _nearby(path: pathlib.Path) -> str:
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"There is no folder {folder} either."
    there = sorted(each.name for each in folder.glob("*.y*ml"))
    near = nearest(path.name, there)
    return f"Did you mean `{path.with_name(near)}`?" if near else f"YAML files in {folder}: {listed(there)}."


def _not_a_job(document: Document) -> Problem:
    what = "the file is empty" if document.values is None else "the file does not hold sections"
    sections = listed(name for name, field in RunConfig.model_fields.items() if field.is_required())
    return Problem("", f"{what}. A job has the sections {sections}; `finetune init quickstart --into .` writes one.")


def _checked(values: dict[str, Any], *, folder: pathlib.Path, broken: set[str]) -> tuple[RunConfig, list[Problem]]:
    """Return the config and everything that is wrong with it; the keys that are broken already are passed over."""
    faults: list[Fault] = []
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        faults = read_faults(error, values)
    problems = [fault.problem() for fault in faults if fault.key not in broken]
    is_draft = bool(faults or broken)
    if is_draft:
        all_broken = broken | {key for fault in faults for key in (fault.key, fault.meant) if key}
        config = draft(RunConfig, values, broken=all_broken)
    config = with_absolute_paths(config, folder)
    problems += broken_rules(config, is_draft=is_draft) + file_problems(config, folder=folder, is_draft=is_draft)
    return config, problems


def _sources(document: Document, replaced: Iterable[str], *, name: str) -> dict[str, Source]:
    return {key: Source(name, line) for key, line in document.lines.items() if not _is_inside(key, replaced)}


def _still_there(problems: Iterable[Problem], replaced: Sequence[str]) -> list[Problem]:
    """Return the problems of the file that no override has taken away with the value."""
    return [each for each in problems if not _is_inside(each.key, replaced)]


def _is_inside(key: str, outer: Iterable[str]) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in outer)


def _in_order(problems: Iterable[Problem], sources: Sources, *, overrides: Sequence[str]) -> list[Problem]:
    """Return the problems with their places: by line, then by override, then what is missing; none twice."""
    order = [named(text) for text in overrides]

    def position(problem: Problem) -> tuple[int, int]:
        if problem.line is not None:
            return 0, problem.line
        return (1, order.index(problem.source)) if problem.source in order else (2, 0)

    return sorted(dict.fromkeys(placed(problem, sources) for problem in problems), key=position)
