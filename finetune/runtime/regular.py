"""Files and nothing else: a device or a FIFO under a file's name may never end, or never begin."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class NotAFile(OSError):
    """What is opened is there, and is no regular file; its text says what it is."""


def require_regular(path: Path) -> os.stat_result:
    """Return the state of the file that the path leads to; raises NotAFile for anything else, OSError for nothing."""
    return _regular(path.stat(), path)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading and wait for nothing; raises NotAFile for anything else."""
    require_regular(path)
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _regular(os.fstat(number), path)  # it may have become another one
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def _regular(state: os.stat_result, path: Path) -> os.stat_result:
    if not stat.S_ISREG(state.st_mode):
        kind = _KINDS.get(stat.S_IFMT(state.st_mode), "no file")
        raise NotAFile(0, f"it is {kind}, not a regular file", str(path))
    return state
