"""Files that appear whole or not at all, and folders that one process makes while the others wait."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


def write_text(path: Path, text: str) -> None:
    """Write the file so that a reader sees all of it or what was there before; survives a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json_lines(path: Path) -> Iterator[Any]:
    """Yield the value of each line; one that was torn by a killed process is left out."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_once(folder: Path, build: Callable[[Path], None], *, say: Callable[[str], None]) -> bool:
    """Make `folder` by calling `build(staging)` in exactly one process; return whether this one built it.

    Others on the same file system wait on a lock file and say so; a builder that dies leaves nothing behind but its
    staging folder, and the next one starts anew. No collective: safe before process groups exist.
    """
    if folder.exists():
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"waiting for another process that makes {folder}")
        lock.acquire()
    try:
        if folder.exists():
            return False
        staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            build(staging)
            staging.chmod(0o755)
            staging.replace(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        sync(folder.parent)
        return True
    finally:
        lock.release()
