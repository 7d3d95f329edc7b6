"""`finetune check` and `finetune migrate`: all problems of a job file at once, and the present names of its keys."""

import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from finetune.config.explain import format_summary, resolved_yaml
from finetune.config.load import (
    RESOLVED_NAME,
    load_config,
    load_resolved,
    read_text,
    require_divisible_batch,
)
from finetune.config.rules.versions import JOB_VERSION, RENAMED_KEYS
from finetune.config.yaml import read_yaml
from finetune.errors import RenamedKeyWarning
from finetune.runtime.files.atomic import write_text
from finetune.runtime.optional import lazily

with lazily(freeze=True):  # torch
    from finetune.commands.compare import runs as compared_runs
    from finetune.commands.rehearse import accelerate_file as accelerate_files
    from finetune.run.setup import model_checks, strategy

_DEFAULT = "default"
"""The source in resolved.yaml of a value that was not written."""


def check(
    path: Path,
    overrides: Sequence[str],
    *,
    num_processes: int | None,
    accelerate_file: Path | None = None,
    run: Path | None = None,
    tries_model: bool = False,
) -> None:
    """Print what the job will do; raises ConfigError with every problem, ModelError for the model that was tried.

    With a run folder, also print the keys that neither the job nor the run has written and whose defaults have changed
    since that run. Raises StrategyError for an accelerate file that cannot be launched, or not with this number of
    processes.
    """
    loaded = load_config(path, overrides)
    num_launched = num_processes
    notes: Sequence[str] = ()
    if accelerate_file is not None:
        notes = accelerate_files.read_accelerate_file(accelerate_file).notes
        num_processes = accelerate_files.data_parallel_size(accelerate_file, num_processes=num_processes)
    if num_processes is not None:
        require_divisible_batch(loaded, num_processes=num_processes)
    of_model: Sequence[str] = ()
    if tries_model:
        launched = None
        if accelerate_file is not None:
            launched = strategy.strategy_of_file(loaded, accelerate_file, num_processes=num_launched)
        of_model = model_checks.check_model(model_checks.CheckedJob(loaded, launched))
    print(f"{path.name} is ready.")
    for line in (*format_summary(loaded.config, num_processes=num_processes), *notes, *of_model):
        print(f"  {line}")
    if run is not None:
        load_resolved(run)  # raises UserError where it cannot be read
        then = dict(compared_runs.config_values((run / RESOLVED_NAME).read_text(encoding="utf-8")))
        lines = []
        for key, (value, source) in compared_runs.config_values(resolved_yaml(loaded)):
            before, source_before = then.get(key, (value, ""))
            if (source, source_before) == (_DEFAULT, _DEFAULT) and before != value:
                lines.append(f"{key}: {before} then, {value} now")
        print(f"defaults that have changed since {run}: {'none' if not lines else ''}".rstrip())
        for line in lines:
            print(f"  {line}")


def migrate(path: Path, *, is_dry_run: bool = False) -> None:
    """Rewrite the job file and print what was changed; with `is_dry_run` only print it.

    Raises ConfigError, and writes nothing, where the file has a problem that no new name solves. The files that it
    names are not looked for.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RenamedKeyWarning)
        load_config(path, elsewhere=[Path(path.absolute().anchor)])
    text, changes = migrated(read_text(path))
    if not changes:
        print(f"{path}: nothing to change.")
        return
    if not is_dry_run:
        write_text(path, text)
    print(f"{path}: {'would change' if is_dry_run else 'changed'}")
    for change in changes:
        print(f"  {change}")


def migrated(text: str) -> tuple[str, list[str]]:
    """Return the text of a job with new names and its version, comments kept, and a sentence for each change."""
    document = read_yaml(text)
    changes: list[str] = []
    written = [key for key in RENAMED_KEYS if key.old in document.lines]
    if written:
        editor = YAML()
        editor.preserve_quotes, editor.width = True, 1 << 16  # no line is broken
        values = editor.load(text)
        for key in written:  # the comments on its line stay; within a section it stays in its place
            section, name = _section(values, key.old)
            target, new_name = _section(values, key.new)
            position = list(section).index(name) if target is section else len(target)
            comments = section.ca.items.pop(name, None)
            target.insert(position, new_name, section.pop(name))
            if comments is not None:
                target.ca.items[new_name] = comments
            changes.append(f"line {document.lines[key.old]}, {key.old}: is now {key.new}")
        output = io.StringIO()
        editor.dump(values, output)
        text = output.getvalue()
    if "version" not in document.lines:
        first = re.search(r"^[^#\s%-].*$", text, re.MULTILINE)
        start = first.start() if first is not None else 0
        text = f"{text[:start]}version: {JOB_VERSION}\n{text[start:]}"
        changes.append(f"version: {JOB_VERSION} was added")
    return text, changes


def _section(values: Any, key: str) -> tuple[CommentedMap, str]:
    *parts, name = key.split(".")
    for part in parts:
        values = values.setdefault(part, CommentedMap())
    return values, name
