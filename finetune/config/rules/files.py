"""Checks that the files and folders in a config exist, and that the run's folder can be written.

A glob pattern may match a whole disk, so the search stops after a number of matches or a short time.
"""

import errno
import glob
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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


Named = Iterator[tuple[str, str]]
"""Keys, with the path that each names."""


def file_problems(
    config: RunConfig, *, folder: Path, is_draft: bool = False, elsewhere: Sequence[Path] = ()
) -> list[Problem]:
    """Return the problems of the files that the config names; `folder` is the config file's.

    The paths in the config are absolute. On a draft, invalid keys are skipped. Files in the folders `elsewhere` are on
    another machine and are not checked.
    """
    problems: list[Problem] = []
    checks: tuple[tuple[Callable[[RunConfig], Named], Callable[[str, str], Iterator[Problem]]], ...] = (
        (_row_files, _row_file_problems),
        (_model_names, partial(_model_folder_problems, folder=folder)),
        (_template_file, _template_problems),
        (_checkpoint_folder, _checkpoint_problems),
        (_run_folder, _run_folder_problems),
    )
    for named, check in checks:
        try:
            for key, path in named(config):
                if any(Path(path).is_relative_to(other) for other in elsewhere):
                    continue
                try:
                    problems.extend(check(key, path))
                except OSError as error:
                    message = f"{error.filename or 'it'} cannot be accessed: {error.strerror}."
                    problems.append(Problem(key, message))
        except AttributeError:
            if not is_draft:
                raise
    return problems


def read_paths(config: RunConfig) -> Named:
    """Yield the local files and folders that the job reads, with their keys."""
    yield from (*_row_files(config), *_template_file(config), *_checkpoint_folder(config))
    yield from ((key, name) for key, name in _model_names(config) if is_path(name))


def _row_files(config: RunConfig) -> Named:
    for key, source in row_sources(config):
        if source.path is not None and not is_url(source.path):
            yield f"{key}.path", source.path


def _row_file_problems(key: str, written: str) -> Iterator[Problem]:
    path = Path(written)
    if path.exists():
        yield from _permission_problems(key, path)
    elif glob.has_magic(written):
        matches = first_matches(path)
        if matches == []:
            yield Problem(key, f"no file matches {path}. {_RELATIVE_PATH_HINT}")
        for match in matches or ():
            yield from _permission_problems(key, match)
    else:
        yield Problem(key, f"the file {path} does not exist. {_RELATIVE_PATH_HINT}")


def _model_names(config: RunConfig) -> Named:
    tokenizer = config.model.tokenizer
    named = {"model.name": config.model.name, "model.tokenizer.name": tokenizer.name if tokenizer else None}
    yield from ((key, name) for key, name in named.items() if name is not None)


def _model_folder_problems(key: str, name: str, *, folder: Path) -> Iterator[Problem]:
    if advice := gguf_advice(folder / name):
        yield Problem(key, advice)
    elif not is_path(name):
        if (folder / name).is_dir():
            yield Problem(
                key, f"`{name}` means a hub model, but a folder with that name exists. For the folder write `./{name}`."
            )
    elif not Path(name).exists():
        yield Problem(key, f"the folder {name} does not exist. {_RELATIVE_PATH_HINT}")
    elif not Path(name).is_dir():
        yield Problem(key, f"{name} is a file. Give the folder that contains the model and its config.json.")
    elif not os.access(name, os.R_OK | os.X_OK):
        yield Problem(key, f"{name} cannot be read. Check its permissions.")


def _template_file(config: RunConfig) -> Named:
    template = config.data.chat_template
    if template is not None and is_path(template):
        yield "data.chat_template", template


def _template_problems(key: str, path: str) -> Iterator[Problem]:
    if not Path(path).is_file():
        yield Problem(key, f"the file {path} does not exist. {_RELATIVE_PATH_HINT}")
    else:
        yield from _permission_problems(key, Path(path))


def _checkpoint_folder(config: RunConfig) -> Named:
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not is_url(resume):
        yield "checkpoint.resume", resume


def _checkpoint_problems(key: str, folder: str) -> Iterator[Problem]:
    if not Path(folder).is_dir():
        message = f"the checkpoint {folder} does not exist. Write `auto`, `never` or the folder of a checkpoint."
        yield Problem(key, f"{message} {_RELATIVE_PATH_HINT}")


def _run_folder(config: RunConfig) -> Named:
    key = "run.local_folder" if is_url(config.run.folder) else "run.folder"
    yield key, str(local_run_folder(config.run.folder, config.run.local_folder))


def _run_folder_problems(key: str, written: str) -> Iterator[Problem]:
    """Yield why the run folder cannot be written on this machine; a URL is checked when the run starts."""
    folder = Path(written)
    parent = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if not parent.exists():
        yield Problem(key, f"{parent} is a broken link. Remove it, or choose another folder.")
    elif not parent.is_dir():
        yield Problem(key, f"{parent} is a file. Choose another folder.")
    else:
        try:  # os.access alone is true for root in /proc and on read-only disks
            if not os.access(parent, os.W_OK | os.X_OK):
                raise PermissionError
            tempfile.TemporaryFile(dir=parent).close()
        except OSError:
            yield Problem(key, f"{parent} is not writable. Choose another folder, or change its permissions.")


def _permission_problems(key: str, path: Path) -> Iterator[Problem]:
    if not os.access(path, os.R_OK):
        yield Problem(key, f"{path} cannot be read. Check its permissions.")


_RELATIVE_PATH_HINT = "A relative path is resolved against the config file's folder."
