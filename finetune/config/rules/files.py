"""Checks that the files and folders in a config exist, and that the run's folder can be written.

A glob pattern may match a whole disk, so the search stops after a number of matches or a short time.
"""

import errno
import glob
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from finetune.config.paths import is_path, is_url, local_run_folder
from finetune.config.rules.sources import row_sources
from finetune.config.run_config import RunConfig
from finetune.errors import Problem

_MAX_MATCHES = 1_000
_TIMEOUT_SECONDS = 2.0


def first_matches(pattern: Path) -> list[Path] | None:
    """Return the first files that match, sorted; None if the search takes too long.

    Raises OSError where the pattern is invalid.
    """
    search = _GlobSearch(pattern)
    thread = threading.Thread(target=search.run, daemon=True)
    thread.start()
    thread.join(_TIMEOUT_SECONDS)
    if search.has_failed:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(pattern))
    return search.matches


class _GlobSearch:
    """A search in a daemon thread, so that the caller can give up waiting for it."""

    def __init__(self, pattern: Path) -> None:
        self._pattern = pattern
        self.matches: list[Path] | None = None
        self.has_failed = False

    def run(self) -> None:
        """Find the first matches."""
        pattern = self._pattern
        try:
            matches = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
            self.matches = sorted(islice(matches, _MAX_MATCHES))
        except (OSError, ValueError, RecursionError, NotImplementedError):
            self.has_failed = True


FileCheck = tuple[str, str, Iterator[Problem]]
"""A key, the path that it names, and the problems of that file."""


def file_problems(
    config: RunConfig, *, folder: Path, is_draft: bool = False, elsewhere: Sequence[Path] = ()
) -> list[Problem]:
    """Return the problems of the files that the config names; `folder` is the config file's.

    The paths in the config are absolute. On a draft, invalid keys are skipped. Files in the folders `elsewhere` are on
    another machine and are not checked.
    """
    problems: list[Problem] = []
    checks: tuple[Callable[[], Iterator[FileCheck]], ...] = (
        lambda: _row_files(config),
        lambda: ((key, name, _model_folder_problems(key, name, folder)) for key, name in _model_names(config)),
        lambda: _template_file(config),
        lambda: _checkpoint_folder(config),
        lambda: _written_folders(config),
    )
    for check in checks:
        try:
            for key, path, path_problems in check():
                if not any(Path(path).is_relative_to(other) for other in elsewhere):
                    problems.extend(_with_os_errors(key, path_problems))
        except AttributeError:
            if not is_draft:
                raise
    return problems


def read_paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the local files and folders that the job reads, with their keys."""
    checks = (_row_files(config), _template_file(config), _checkpoint_folder(config))
    yield from ((key, path) for check in checks for key, path, _ in check)
    yield from ((key, name) for key, name in _model_names(config) if is_path(name))


def _with_os_errors(key: str, problems: Iterator[Problem]) -> Iterator[Problem]:
    """Yield the problems, or an error of the file system as one."""
    try:
        yield from problems
    except OSError as error:
        yield Problem(key, f"{error.filename or 'it'} cannot be accessed: {error.strerror}.")


def _row_files(config: RunConfig) -> Iterator[FileCheck]:
    for key, source in row_sources(config):
        if source.path is not None and not is_url(source.path):
            yield f"{key}.path", source.path, _row_file_problems(f"{key}.path", source.path)


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


def _model_names(config: RunConfig) -> Iterator[tuple[str, str]]:
    tokenizer = config.model.tokenizer
    named = {"model.name": config.model.name, "model.tokenizer.name": tokenizer.name if tokenizer else None}
    yield from ((key, name) for key, name in named.items() if name is not None)


def _model_folder_problems(key: str, name: str, folder: Path) -> Iterator[Problem]:
    if not is_path(name):
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


def _template_file(config: RunConfig) -> Iterator[FileCheck]:
    template = config.data.chat_template
    if template is not None and is_path(template):
        yield "data.chat_template", template, _file_problems("data.chat_template", Path(template))


def _file_problems(key: str, path: Path) -> Iterator[Problem]:
    if not path.is_file():
        yield Problem(key, f"the file {path} does not exist. {_RELATIVE_PATH_HINT}")
    else:
        yield from _permission_problems(key, path)


def _checkpoint_folder(config: RunConfig) -> Iterator[FileCheck]:
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not is_url(resume):
        yield "checkpoint.resume", resume, _resume_problems(resume)


def _resume_problems(folder: str) -> Iterator[Problem]:
    if not Path(folder).is_dir():
        message = (
            f"the checkpoint {folder} does not exist. Write `auto`, `never` or the folder of a checkpoint. "
            f"{_RELATIVE_PATH_HINT}"
        )
        yield Problem("checkpoint.resume", message)


def _written_folders(config: RunConfig) -> Iterator[FileCheck]:
    folder = local_run_folder(config.run.folder, config.run.local_folder)
    key = "run.local_folder" if is_url(config.run.folder) else "run.folder"
    yield key, str(folder), _run_folder_problems(key, folder)


def _run_folder_problems(key: str, folder: Path) -> Iterator[Problem]:
    """Yield why the run folder cannot be written on this machine; a URL is checked when the run starts."""
    parent = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if not parent.exists():
        yield Problem(key, f"{parent} is a broken link. Remove it, or choose another folder.")
    elif not parent.is_dir():
        yield Problem(key, f"{parent} is a file. Choose another folder.")
    elif not _is_writable(parent):
        yield Problem(key, f"{parent} is not writable. Choose another folder, or change its permissions.")


def _is_writable(folder: Path) -> bool:
    """Return whether a file can be written there; os.access alone is true for root in /proc and on read-only disks."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _permission_problems(key: str, path: Path) -> Iterator[Problem]:
    if not os.access(path, os.R_OK):
        yield Problem(key, f"{path} cannot be read. Check its permissions.")


_RELATIVE_PATH_HINT = "A relative path is resolved against the config file's folder."
