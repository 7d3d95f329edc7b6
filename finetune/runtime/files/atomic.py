"""Files and folders that are written atomically, and folders that one process builds while the others wait.

Everything is first written under a temporary name:

.status.json.3fa2b1c0-12345-9f3c01ab.finetune-tmp

It holds the host (a digest of its name), the process and a random part, so that a later process can check whether
the writer is still alive. Nothing with any other name is ever removed.
"""

import errno
import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import psutil
from filelock import FileLock, Timeout

from finetune.runtime.files.read import parse_json, read_regular
from finetune.runtime.optional import no_op
from finetune.runtime.text.redact import redact_known_values
from finetune.runtime.text.terminal import format_json

UMASK = os.umask(0o077)
os.umask(UMASK)
"""The umask of this process at its start: reading it requires setting it, which would race with threads later."""

SUFFIX = ".finetune-tmp"
REPLACED_SUFFIX = ".older"
"""The suffix of a folder while it is replaced, after the temporary name of the folder that replaces it."""

STALE_SECONDS_LOCKED, STALE_SECONDS_SHARED = 3600.0, 86_400.0
"""Age after which files of another host count as abandoned, in a folder that we lock and in others."""

_LONGEST_BYTES = 150  # of the 255 of a file name
_TICK_SECONDS = 2.0  # by which a file may appear older than its writer
_MAX_FOLDERS = 1000
_NAME = re.compile(
    rf"\.(?P<name>.+)\.(?P<host>[0-9a-f]{{8}})-(?P<pid>[0-9]{{1,10}})-[0-9a-f]{{8}}{re.escape(SUFFIX)}"
    rf"(?P<older>{re.escape(REPLACED_SUFFIX)})?"
)


def temporary_path(path: Path) -> Path:
    """Return a unique name next to `path` for its new content."""
    name = path.name if len(os.fsencode(path.name)) <= _LONGEST_BYTES else "long"
    return path.with_name(f".{name}.{_host()}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}")


def remove_stale(folder: Path, *, seconds: float, below: bool = False) -> list[Path]:
    """Remove files of dead writers in the folder, with `below` also in its subfolders, and return them.

    Writers on other hosts cannot be inspected: their files count as abandoned after this time without a change. A
    folder whose writer was killed between the two renames of a replacement gets its older content back.
    """
    removed, parents = [], [folder]
    if below:
        with suppress(OSError):
            inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
            parents += [path for path in inner[:_MAX_FOLDERS] if not path.name.endswith((SUFFIX, REPLACED_SUFFIX))]
    for parent in parents:
        with suppress(OSError):
            for path in sorted(parent.iterdir()):
                match = _NAME.fullmatch(path.name)
                if match is None or not _is_stale(path, match, seconds):
                    continue
                with suppress(OSError):
                    target = path.with_name(match["name"])
                    if match["older"] and not os.path.lexists(target):
                        path.rename(target)
                    elif path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    else:
                        path.unlink()
                    removed.append(path)
    return removed


def _is_stale(path: Path, match: re.Match[str], seconds: float) -> bool:
    try:
        written = path.lstat().st_mtime
    except OSError:
        return False
    if match["host"] != _host():
        return time.time() - written > seconds
    try:
        return bool(psutil.Process(int(match["pid"])).create_time() > written + _TICK_SECONDS)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _host() -> str:
    return hashlib.blake2b(platform.node().encode(), digest_size=4).hexdigest()


def require_writable(path: Path) -> None:
    """Raise OSError unless a file can be written there, before a result takes long to compute."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write the file so that a reader sees either all of it or the old content; survives a power cut."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes, *, survives_power_cut: bool = True) -> None:
    """Write the file atomically; without surviving a power cut, this is much faster."""
    with write_atomically(path, survives_power_cut=survives_power_cut) as file:
        file.write(content)


@contextmanager
def write_atomically(path: Path, *, survives_power_cut: bool = True) -> Iterator[BinaryIO]:
    """Yield a file to write to, which becomes `path` at the end; after an error the old one is unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = temporary_path(path)
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            if survives_power_cut:
                file.flush()
                os.fsync(file.fileno())
        staging.chmod(0o666 & ~UMASK)
        staging.replace(path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
    if survives_power_cut:
        fsync(path.parent)


def write_json(path: Path, value: Any, *, exact: bool = False) -> None:
    """Write `value` as indented JSON, whole or not at all, and without secrets.

    `exact` is for values that are read back and compared: it does not remove secrets, so the value must not have any.
    """
    write_text(path, format_json(value if exact else redact_known_values(value), indent=2) + "\n")


def read_json_lines(path: Path) -> Iterator[Any]:
    """Yield the value of each line, skipping damaged or incomplete ones."""
    for line in read_regular(path).decode("utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            yield parse_json(line)


def fsync(path: Path) -> None:
    """Sync a file's content, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def build_once(
    folder: Path,
    build: Callable[[Path], None],
    *,
    log: Callable[[str], None],
    resumes: bool = False,
    while_waiting: Callable[[Path], None] = no_op,
) -> bool:
    """Build `folder` by calling `build(staging)` in exactly one process; return whether this one built it.

    Others on the same file system wait for a lock file and log it; `while_waiting(staging)` is called every second.
    When the builder dies, one of them takes over. The staging folder of an unfinished build is removed, unless the
    build `resumes` from it. Not collective: safe before process groups exist.
    """
    if folder.exists():
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f".{folder.name}.making")
    with _locked(folder.with_name(f".{folder.name}.lock"), log=log, target=folder, wait=lambda: while_waiting(staging)):
        if folder.exists():
            return False
        if os.path.lexists(folder):
            _rename_aside(folder)  # a broken link
        try:
            is_folder = os.path.lexists(staging) and stat.S_ISDIR(staging.lstat().st_mode)
            if is_folder and not resumes:
                shutil.rmtree(staging, ignore_errors=True)
            elif not is_folder:  # a file or a link
                staging.unlink(missing_ok=True)
            staging.mkdir(exist_ok=True)
            build(staging)
            staging.replace(folder)
        finally:
            if not resumes:
                shutil.rmtree(staging, ignore_errors=True)
        fsync(folder.parent)
        return True


def quarantine(folder: Path, is_damaged: Callable[[], bool], *, log: Callable[[str], None]) -> Path | None:
    """Rename a damaged folder of `build_once`, and return its new path.

    It is checked again under the lock, while no other process builds or renames it; None if it is intact or missing.
    Raises OSError if it cannot be renamed.
    """
    with _locked(folder.with_name(f".{folder.name}.lock"), log=log, target=folder, wait=no_op):
        if not os.path.lexists(folder) or not is_damaged():
            return None
        return _rename_aside(folder)


def _rename_aside(path: Path) -> Path:
    numbered = (path.with_name(f".damaged-{path.name}-{number}") for number in count(1))
    aside = next(candidate for candidate in numbered if not os.path.lexists(candidate))
    path.rename(aside)
    return aside


@contextmanager
def _locked(path: Path, *, log: Callable[[str], None], target: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock, which the kernel releases when its process dies; call `wait` every second until it is free."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log(f"waiting for another process that builds {target}")
        while not lock.is_locked:
            wait()
            with suppress(Timeout):
                lock.acquire(timeout=1.0)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder that replaces `folder` at the end; after an error the old one is unchanged."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(folder.parent, seconds=STALE_SECONDS_SHARED)
    staging = temporary_path(folder)
    staging.mkdir(mode=0o700)
    older = staging.with_name(f"{staging.name}{REPLACED_SUFFIX}")
    try:
        yield staging
        # Modes by the umask: libraries make some files readable only by their owner.
        for path in (staging, *staging.rglob("*")):
            if not path.is_symlink():
                path.chmod((0o777 if path.is_dir() else 0o666) & ~UMASK)
        for path in staging.rglob("*"):
            fsync(path)
        fsync(staging)
        if folder.exists():
            folder.replace(older)
        staging.replace(folder)
        fsync(folder.parent)
    except BaseException:
        if older.exists() and not folder.exists():
            older.replace(folder)
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(older, ignore_errors=True)
