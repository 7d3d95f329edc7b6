"""Loads a RunConfig from a job YAML with its overrides, and reports all of its problems at once.

The config of an earlier run is loaded from the `resolved.yaml` in its folder, perhaps on another machine.
"""

import copy
import errno
import math
import os
import pathlib
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from pydantic import ValidationError

from finetune.config.formatting import closest_multiples, format_list, job_yaml
from finetune.config.overrides import OverrideResult, apply_overrides, override_label
from finetune.config.paths import is_url, local_run_folder, path_problems, with_absolute_paths
from finetune.config.plugins import activate_options, load_plugins, missing_options, untrusted_plugins
from finetune.config.rules import checkpoint, data, model, task, train
from finetune.config.rules import sources as source_rules
from finetune.config.rules.files import file_problems
from finetune.config.rules.unused_keys import keys_are_written_once, no_unused_keys
from finetune.config.rules.versions import rename_recorded_values, replace_former_adapters, version_problem
from finetune.config.run_config import RunConfig, smallest_microbatch_size, with_run_folder
from finetune.config.section import KeyLocation, KeyLocations, expand_names, join_key, parent_keys, with_location
from finetune.config.validation import InvalidKey, draft_section, read_validation_errors
from finetune.config.yaml import MAX_FILE_BYTES, MAX_LISTED, MAX_RESOLVED_VALUES, invalid_characters, read_yaml
from finetune.errors import ConfigError, Problem, UserError
from finetune.runtime.text.redact import register_secrets


def read_text_file(path: pathlib.Path, *, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the file's text; raises OSError with the reason, or UnicodeDecodeError if it is not UTF-8.

    Only regular files are read: reading a pipe or a device may never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(path))
        content = file.read(max_bytes + 1)
        if content is None:  # the kernel's log has the mode of a regular file, and may be empty
            raise OSError(errno.EAGAIN, "it returned no data", str(path))
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes / (1 << 20):g} MiB", str(path))
    return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


_MAX_SUGGESTED_FILES = 20
"""Maximum number of files in a folder that are listed where another one was named."""


@dataclass(frozen=True)
class LoadedConfig:
    """A valid config, with the text of its file and the location of every key that was written.

    All paths in `config` are absolute. For a run at a URL, once it has a local folder, `run.folder` in `config` is
    that folder and `remote` is the URL.
    """

    config: RunConfig
    path: pathlib.Path
    text: str
    sources: KeyLocations
    remote: str | None = None

    def refuse(self, problems: Iterable[Problem]) -> None:
        """Raise ConfigError with these problems, each with the line of its key; nothing where there are none."""
        located = [with_location(problem, self.sources) for problem in problems]
        if located:
            raise ConfigError(located, self.path.name)


def load_config(
    path: pathlib.Path, overrides: Sequence[str] = (), *, elsewhere: Sequence[pathlib.Path] = ()
) -> LoadedConfig:
    """Return the config in the file with the overrides (`train.steps=4`) applied.

    Relative paths, those in overrides too, are resolved against the file's folder. Files in the folders `elsewhere`
    are on the machine that will run the job and are not checked. Raises ConfigError with all problems at once.
    """
    text = _read(path)
    document = read_yaml(text)
    if not isinstance(document.values, dict):
        what = "the file is empty" if document.values is None else "the file has no sections"
        sections = format_list(name for name, field in RunConfig.model_fields.items() if field.is_required())
        advice = f"A job needs the sections {sections}; `finetune init quickstart --into .` writes an example."
        raise ConfigError(document.problems or [Problem("", f"{what}. {advice}")], path.name)
    expand_names(document.values, document.lines)
    overridden = apply_overrides(document.values, overrides)
    replaced = frozenset(overridden.replaced)
    lines = {key: line for key, line in document.lines.items() if not _is_inside(key, replaced)}
    sources = {key: KeyLocation(path.name, line) for key, line in lines.items()} | overridden.sources
    # Problems of the file in values that an override replaced do not count.
    overridden.problems[:0] = [problem for problem in document.problems if not _is_inside(problem.key, replaced)]
    folder = path.absolute().parent.resolve()
    config = _load_overridden(
        overridden, path, folder=folder, sources=sources, overrides=overrides, elsewhere=elsewhere
    )
    return LoadedConfig(config, path, text, sources)


PYTHON_JOB = pathlib.Path("the job")
"""The name of a job that was written in Python, in messages."""


def load_values(
    values: dict[str, Any],
    overrides: Sequence[str] = (),
    *,
    folder: pathlib.Path,
    elsewhere: Sequence[pathlib.Path] = (),
) -> LoadedConfig:
    """Return the config of a job that was written in Python, as `load_config` does for a file in the folder.

    The values are plain types and are not changed.
    """
    values = copy.deepcopy(values)
    expand_names(values, {})
    overridden = apply_overrides(values, overrides)
    config = _load_overridden(
        overridden, PYTHON_JOB, folder=folder, sources=overridden.sources, overrides=overrides, elsewhere=elsewhere
    )
    written = {key: KeyLocation("Python") for key in _written_keys(values)}
    return LoadedConfig(config, PYTHON_JOB, job_yaml(config), {**written, **overridden.sources})


def _written_keys(value: Any, prefix: str = "") -> Iterator[str]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        key = join_key(prefix, name)
        yield key
        yield from _written_keys(inner, key)


def _load_overridden(
    overridden: OverrideResult,
    path: pathlib.Path,
    *,
    folder: pathlib.Path,
    sources: KeyLocations,
    overrides: Sequence[str],
    elsewhere: Sequence[pathlib.Path],
) -> RunConfig:
    """Return the valid config of these values; raises ConfigError with all problems at once."""
    register_secrets(overridden.values)
    problems = overridden.problems
    problems += replace_former_adapters(overridden.values)
    if invalid_characters(str(folder)) is not None:
        place = "the path of its folder is not UTF-8 text, in which libraries write paths. Rename the folder."
        problems.append(Problem("", place))
    if (newer := version_problem(overridden.values)) is not None:
        problems.append(newer)
    if plugin_problems := load_plugins(overridden.values, folder):
        raise ConfigError(_sort_problems(plugin_problems, sources, overrides=overrides), path.name)
    broken = {problem.key for problem in problems}  # of keys that are known to be invalid; not reported again
    faults: list[InvalidKey] = []
    try:
        config = RunConfig.model_validate(overridden.values)
    except ValidationError as error:
        faults = read_validation_errors(error, overridden.values)
    invalid = sorted((fault for fault in faults if fault.key not in broken), key=lambda fault: _line(fault, sources))
    problems += [fault.problem() for fault in invalid[:MAX_LISTED]]
    broken |= {key for fault in faults for key in (fault.key, fault.meant) if key}
    if broken:
        config = draft_section(RunConfig, overridden.values, broken=broken)
    if unusable := path_problems(config, folder):
        problems += unusable
        broken |= {problem.key for problem in unusable}
        config = draft_section(RunConfig, overridden.values, broken=broken)
    config = with_absolute_paths(config, folder)
    problems += _rule_problems(config, is_draft=bool(broken))
    problems += [] if broken else missing_options(config)
    problems += file_problems(config, folder=folder, is_draft=bool(broken), elsewhere=elsewhere)
    if problems:
        ordered = _sort_problems(problems, sources, overrides=overrides)
        num_more = max(0, len(invalid) - MAX_LISTED) + max(0, len(ordered) - MAX_LISTED)
        raise ConfigError(ordered[:MAX_LISTED], path.name, num_more=num_more)
    activate_options(config.plugin_options)
    return config


RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    *train.RULES,
    *model.RULES,
    *source_rules.RULES,
    *data.RULES,
    *checkpoint.RULES,
    *task.RULES,
    keys_are_written_once,
    no_unused_keys,
)


def _rule_problems(config: RunConfig, *, is_draft: bool) -> list[Problem]:
    """Return the problems that all rules find; of a draft, a rule that reads an invalid key is skipped."""
    problems: list[Problem] = []
    for rule in RULES:
        try:
            problems.extend(rule(config))
        except AttributeError:
            if not is_draft:
                raise
    return problems


def require_divisible_batch(loaded: LoadedConfig, *, num_processes: int) -> None:
    """Raise ConfigError when the global batch cannot be divided among the processes."""
    batch, microbatch = loaded.config.train.global_batch_size, smallest_microbatch_size(loaded.config)
    share = num_processes * microbatch
    if batch % share:
        processes = f"{num_processes} process{'es' if num_processes > 1 else ''} x {microbatch} per microbatch"
        nearest = closest_multiples(batch, share)
        message = f"{batch} cannot be shared by {processes}. Nearest that can: {nearest}."
        loaded.refuse([Problem("train.global_batch_size", message)])


def _read(path: pathlib.Path) -> str:
    try:
        return read_text_file(path)
    except FileNotFoundError:
        folder = path.absolute().parent
        hint = f"The folder {folder} does not exist either."
        if folder.is_dir():
            names = format_list(sorted(file.name for file in islice(folder.glob("*.y*ml"), _MAX_SUGGESTED_FILES)))
            hint = f"YAML files in {folder}: {names}."
        fault = f"there is no such file. {hint}"
    except IsADirectoryError:
        fault = "this is a folder. Give the path of the job file in it."
    except UnicodeDecodeError as error:
        fault = f"this is not UTF-8 text (byte {error.start}). Save the file as UTF-8."
    except OSError as error:
        fault = f"it cannot be read: {error.strerror}. Write the job to a text file and give its path."
    raise ConfigError([Problem("", fault)], str(path))


def _line(fault: InvalidKey, sources: KeyLocations) -> float:
    """Return the line of the key for sorting: overrides come after all lines, missing keys last."""
    source = sources.get(fault.key)
    if source is None:
        return math.inf
    return sys.maxsize if source.line is None else source.line


def _is_inside(key: str, outer: frozenset[str]) -> bool:
    return key in outer or any(parent in outer for parent in parent_keys(key))


def _sort_problems(problems: Iterable[Problem], sources: KeyLocations, *, overrides: Sequence[str]) -> list[Problem]:
    """Return the problems with their locations, sorted by line, then by override, then missing keys, each once."""
    order = {override_label(text): number for number, text in reversed([*enumerate(overrides)])}

    def position(problem: Problem) -> tuple[int, int]:
        if problem.line is not None:
            return 0, problem.line
        return (1, order[problem.source]) if problem.source in order else (2, 0)

    return sorted(dict.fromkeys(with_location(problem, sources) for problem in problems), key=position)


RESOLVED_NAME = "resolved.yaml"
_REWRITE_ADVICE = "Restart the run, which rewrites the file."


def load_resolved(run: pathlib.Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Return the config that the run in this folder was started with, with `run.folder` set to this folder.

    Overrides are applied; their relative paths are resolved against the current folder. The files that the config names
    are not checked: data and model may no longer exist. Raises UserError where the file is missing or was written by
    another version of finetune, ConfigError for invalid overrides.
    """
    path = run / RESOLVED_NAME
    try:
        text = read_text_file(path, max_bytes=8 * MAX_FILE_BYTES)
    except OSError as error:
        why = error.strerror or error
        raise UserError(
            f"{path}: cannot be read ({why}). Give the folder of a run; its config is in {RESOLVED_NAME}."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: the file is damaged: it is not UTF-8 text. {_REWRITE_ADVICE}") from error
    document = read_yaml(text, max_values=MAX_RESOLVED_VALUES)
    if document.problems or not isinstance(document.values, dict):
        fault = document.problems[0] if document.problems else "it has no sections."
        raise UserError(f"{path}: the file is damaged: {fault} {_REWRITE_ADVICE}")
    rename_recorded_values(document.values)
    replace_former_adapters(document.values)
    overridden = apply_overrides(document.values, overrides)
    if overridden.problems:
        raise ConfigError(overridden.problems, path.name)
    untrusted = [] if "plugins" in overridden.sources else untrusted_plugins(overridden.values)
    if plugin_problems := untrusted or load_plugins(overridden.values, pathlib.Path.cwd()):
        raise ConfigError(plugin_problems, path.name)
    try:
        config = with_absolute_paths(RunConfig.model_validate(overridden.values), pathlib.Path.cwd())
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if overrides:
            raise UserError(f"--set: {key}: {first['msg']}.") from error
        raise UserError(
            f"{path}: was written by another version of finetune: {key}: {first['msg']}. Use that version "
            "(see environment.json), or restart the run with this version, which rewrites the file."
        ) from error
    activate_options(config.plugin_options)
    remote = config.run.folder if is_url(config.run.folder) else None
    return LoadedConfig(with_run_folder(config, str(run.absolute())), path, text, {}, remote)


def with_local_folder(loaded: LoadedConfig) -> LoadedConfig:
    """Return the config with the folder on this machine in place of the URL, which it remembers; a path stays."""
    run = loaded.config.run
    if not is_url(run.folder):
        return loaded
    local = local_run_folder(run.folder, run.local_folder)
    return replace(loaded, config=with_run_folder(loaded.config, str(local)), remote=run.folder)
