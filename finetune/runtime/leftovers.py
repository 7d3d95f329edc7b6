"""What is written under a temporary name first: how it is called, and what a killed process has left of it.

    .status.json.3fa2b1c0-12345-9f3c01ab.finetune-tmp

A name holds the host (a digest of its name), the process and a random part, so that whoever comes later can tell
whether the writer still lives. Nothing that is called otherwise is ever removed.
"""

import hashlib
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

SUFFIX = ".finetune-tmp"
OLDER = ".older"
"""What a folder that is being replaced is called meanwhile, behind the temporary name of the one that replaces it."""

LOCKED_SECONDS, SHARED_SECONDS = 3600.0, 86_400.0
"""After so long without a change, what another host has left is abandoned: in a folder that we hold, and in others."""

_LONGEST_BYTES = 150  # of 255 that a name may have
_TICK_SECONDS = 2.0  # by which a file may seem older than the process that made it
_MOST_FOLDERS = 1000
_NAME = re.compile(
    rf"\.(?P<name>.+)\.(?P<host>[0-9a-f]{{8}})-(?P<pid>[0-9]{{1,10}})-[0-9a-f]{{8}}{re.escape(SUFFIX)}"
    rf"(?P<older>{re.escape(OLDER)})?"
)


def temporary(path: Path) -> Path:
    """Return a name beside `path` under which a process writes what is to become it; never the same twice."""
    name = path.name if len(os.fsencode(path.name)) <= _LONGEST_BYTES else "long"
    return path.with_name(f".{name}.{_host()}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}")


def clear_abandoned(folder: Path, *, seconds: float, below: bool = False) -> list[Path]:
    """Remove what writers that live no more have left in the folder and return it; `below`: in its folders, too.

    Of another host's writers nothing is known: what has not changed for so many seconds is taken for abandoned. Where a
    folder was being replaced and its writer was killed between the two renames, it gets its older content back.
    """
    cleared = []
    for each in (folder, *(_folders(folder) if below else ())):
        with suppress(OSError):
            found = [(path, match) for path in sorted(each.iterdir()) if (match := _NAME.fullmatch(path.name))]
            cleared += [path for path, match in found if _is_abandoned(path, match, seconds) and _remove(path, match)]
    return cleared


def _folders(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
        yield from (path for path in inner[:_MOST_FOLDERS] if not path.name.endswith((SUFFIX, OLDER)))


def _is_abandoned(path: Path, match: re.Match[str], seconds: float) -> bool:
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


def _remove(path: Path, match: re.Match[str]) -> bool:
    try:
        target = path.with_name(match["name"])
        if match["older"] and not os.path.lexists(target):
            path.rename(target)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError:
        return False
    return True


def _host() -> str:
    return hashlib.blake2b(platform.node().encode(), digest_size=4).hexdigest()
