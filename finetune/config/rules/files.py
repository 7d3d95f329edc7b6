"""Checks that the files and folders in a config exist, and that the run's folder can be written.

A glob pattern may match a whole disk, so the search stops after a number of matches or a short time.
"""

import errno
import glob
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import islice
from pathlib import Path

from finetune.config.paths import is_path, is_url, local_run_folder
from finetune.config.rules.sources import row_sources
from finetune.config.run_config import RunConfig
from finetune.errors import Problem
from finetune.runtime.files.read import gguf_advice

_MAX_MATCHES = 1_000
_TIMEOUT_SECONDS = 2.0


def first_matches(pattern: Path) -> list[Path] | None:
    """Return the first files that match, sorted; None if the search takes too long.

    Raises OSError where the pattern is invalid.
    """
    found: list[list[Path] | None] = []  # None: the search has failed

    def search() -> None:
        try:
            matches = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
            found.append(sorted(islice(matches, _MAX_MATCHES)))
        except (OSError, ValueError, RecursionError, NotImplementedError):
            found.append(None)

    thread = threading.Thread(target=search, daemon=True)  # the caller can give up waiting for it
    thread.start()
    thread.join(_TIMEOUT_SECONDS)
    if found == [None]:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(pattern))
    return found[0] if found else None


class _Use(Enum):
    """What a path of the job is for, and what it has to be."""

    ROWS = "file"
    MODEL = "folder"  # or the name of a model
    TEMPLATE = "template file"
    CHECKPOINT = "checkpoint"
    RUN = "run folder"


def file_problems(
    config: RunConfig, *, folder: Path, is_draft: bool = False, elsewhere: Sequence[Path] = ()
) -> list[Problem]:
    """Return the problems of the files that the config names; `folder` is the config file's.

    The paths in the config are absolute. On a draft, invalid keys are skipped. Files in the folders `elsewhere` are on
    another machine and are not checked.
    """
    problems: list[Problem] = []
    for named in _NAMED:
        try:
            for use, key, path in named(config):
                if any(Path(path).is_relative_to(other) for other in elsewhere):
                    continue
                try:
                    found = _path_problem(use, path, folder=folder)
                except OSError as error:
                    found = f"{error.filename or 'it'} cannot be accessed: {error.strerror}."
                problems += [Problem(key, found)] if found else []
        except AttributeError:
            if not is_draft:
                raise
    return problems


def read_paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the local files and folders that the job reads, with their keys."""
    for named in _NAMED:
        for use, key, path in named(config):
            if use is not _Use.RUN and (use is not _Use.MODEL or is_path(path)):
                yield key, path


Named = Iterator[tuple[_Use, str, str]]
"""What is named, by which key, and the path."""


def _rows(config: RunConfig) -> Named:
    for key, source in row_sources(config):
        if source.path is not None and not is_url(source.path):
            yield _Use.ROWS, f"{key}.path", source.path


def _model(config: RunConfig) -> Named:
    tokenizer = config.model.tokenizer
    named = {"model.name": config.model.name, "model.tokenizer.name": tokenizer.name if tokenizer else None}
    yield from ((_Use.MODEL, key, name) for key, name in named.items() if name is not None)


def _template(config: RunConfig) -> Named:
    template = config.data.chat_template
    if template is not None and is_path(template):
        yield _Use.TEMPLATE, "data.chat_template", template


def _checkpoint(config: RunConfig) -> Named:
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not is_url(resume):
        yield _Use.CHECKPOINT, "checkpoint.resume", resume


def _run(config: RunConfig) -> Named:
    key = "run.local_folder" if is_url(config.run.folder) else "run.folder"
    yield _Use.RUN, key, str(local_run_folder(config.run.folder, config.run.local_folder))


_NAMED: tuple[Callable[[RunConfig], Named], ...] = (_rows, _model, _template, _checkpoint, _run)
_RELATIVE_PATH_HINT = "A relative path is resolved against the config file's folder."


def _path_problem(use: _Use, written: str, *, folder: Path) -> str:
    """Return why the path cannot be used as it is to be; an empty text if it can."""
    path = Path(written)
    if use is _Use.RUN:
        return _run_folder_problem(path)
    if use is _Use.MODEL and (advice := gguf_advice(folder / written)):
        return advice
    if use is _Use.MODEL and not is_path(written):
        is_folder = (folder / written).is_dir()
        means = (
            f"`{written}` means a hub model, but a folder with that name exists. For the folder write `./{written}`."
        )
        return means if is_folder else ""
    files = [path]
    if use is _Use.ROWS and glob.has_magic(written) and not path.exists():
        matches = first_matches(path)
        if matches == []:
            return f"no file matches {path}. {_RELATIVE_PATH_HINT}"
        files = matches or []
    for file in files:
        if not file.exists():
            return f"the {use.value} {file} does not exist. {_RELATIVE_PATH_HINT}"
        if use in (_Use.MODEL, _Use.CHECKPOINT) and not file.is_dir():
            return f"{file} is a file. Give the folder of the {use.name.lower()}."
        if use is _Use.TEMPLATE and not file.is_file():
            return f"{file} is a folder. Give a file."
        if not os.access(file, os.R_OK):
            return f"{file} cannot be read. Check its permissions."
    return ""


def _run_folder_problem(folder: Path) -> str:
    """Return why the run folder cannot be written on this machine; a URL is checked when the run starts."""
    parent = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if not parent.exists():
        return f"{parent} is a broken link. Remove it, or choose another folder."
    if not parent.is_dir():
        return f"{parent} is a file. Choose another folder."
    try:  # os.access alone is true for root in /proc and on read-only disks
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError
        tempfile.TemporaryFile(dir=parent).close()
    except OSError:
        return f"{parent} is not writable. Choose another folder, or change its permissions."
    return ""
