"""`finetune migrate`: an old job file with the present names of its keys, its comments and its version."""

import io
import re
import warnings
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from finetune.config.load import load_config, read_text
from finetune.config.rules.versions import JOB_VERSION, RENAMED_KEYS, RenamedKey
from finetune.config.yaml import read_yaml
from finetune.errors import RenamedKeyWarning
from finetune.runtime.files.atomic import write_text


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
        for key in written:
            _rename(values, key)
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


def _rename(values: Any, key: RenamedKey) -> None:
    """Move the key to its new name, with the comments on its line; within a section it stays in its place."""
    section, name = _section(values, key.old)
    target, new_name = _section(values, key.new)
    position = list(section).index(name) if target is section else len(target)
    comments = section.ca.items.pop(name, None)
    target.insert(position, new_name, section.pop(name))
    if comments is not None:
        target.ca.items[new_name] = comments


def _section(values: Any, key: str) -> tuple[CommentedMap, str]:
    *parts, name = key.split(".")
    for part in parts:
        values = values.setdefault(part, CommentedMap())
    return values, name
