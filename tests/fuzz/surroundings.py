"""What a process may find around it: closed, full and broken outputs, no current folder, no free descriptors."""

import ctypes
import os
import resource
import shutil
import sys
from pathlib import Path

CLOSED_OUTPUT, CLOSED_ERRORS, ALL_CLOSED = "stdout is closed", "stderr is closed", "all streams are closed"
FULL_OUTPUT, FULL_ERRORS = "stdout is full", "stderr is full"
BROKEN_OUTPUT, BROKEN_STREAMS = "nobody reads stdout", "nobody reads stdout and stderr"
NO_FOLDER, FEW_FILES = "the current folder is deleted", "few files may be open"
NOT_WRITABLE, FULL_DISK, ASCII = "home and temporary folder cannot be written", "the disk is full", "ASCII alone"
FULL_SOON, FULL_LATER = "the disk is full after 9000 bytes", "the disk is full after 60000 bytes"
READ_ONLY = "an ordinary user to whom all files are read-only"
SURROUNDINGS = (
    CLOSED_OUTPUT,
    CLOSED_ERRORS,
    ALL_CLOSED,
    FULL_OUTPUT,
    FULL_ERRORS,
    BROKEN_OUTPUT,
    BROKEN_STREAMS,
    NO_FOLDER,
    FEW_FILES,
    NOT_WRITABLE,
    FULL_DISK,
    FULL_SOON,
    FULL_LATER,
    ASCII,
    READ_ONLY,
)
_CAPABILITY_VERSION_3 = 0x20080522
_REPLACED: list[object] = []
"""Streams that close their descriptors, which others use by then, when nothing refers to them."""

_NAMES = ("stdin", "stdout", "stderr")


def apply(surroundings: str) -> None:
    """Change this process, which has just started, into one that finds these surroundings."""
    if surroundings in (CLOSED_OUTPUT, CLOSED_ERRORS, ALL_CLOSED):
        closed = {CLOSED_OUTPUT: (1,), CLOSED_ERRORS: (2,), ALL_CLOSED: (0, 1, 2)}[surroundings]
        for descriptor in closed:
            os.close(descriptor)
            setattr(sys, _NAMES[descriptor], None)
    elif surroundings in (FULL_OUTPUT, FULL_ERRORS):
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1 if surroundings == FULL_OUTPUT else 2)
        _open_streams()
    elif surroundings in (BROKEN_OUTPUT, BROKEN_STREAMS):
        for descriptor in (1, 2) if surroundings == BROKEN_STREAMS else (1,):
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, descriptor)
        _open_streams()
    elif surroundings == NO_FOLDER:
        gone = Path("gone")
        gone.mkdir()
        os.chdir(gone)
        shutil.rmtree(Path.cwd())
    elif surroundings == FEW_FILES:
        open_now = len(list(Path("/proc/self/fd").iterdir()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 4, open_now + 4))
    elif surroundings == NOT_WRITABLE:
        os.environ |= {"HOME": "/proc/home", "TMPDIR": "/proc/tmp", "HF_HOME": "/proc/hf", "XDG_CACHE_HOME": "/proc/c"}
    elif surroundings in (FULL_DISK, FULL_SOON, FULL_LATER):
        size = {FULL_DISK: 2048, FULL_SOON: 9000, FULL_LATER: 60000}[surroundings]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        _send_through_pipe()
    elif surroundings == READ_ONLY:
        _lose_privileges(Path.cwd())
    elif surroundings == ASCII:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(encoding="ascii")


def _lose_privileges(folder: Path) -> None:
    """Let nothing in the folder but its temporary files be written, and give up root's right to do so nevertheless."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink() and folder / "tmp" not in (path, *path.parents):
            path.chmod(path.stat().st_mode & ~0o222)
    header, no_capabilities = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, no_capabilities) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _send_through_pipe() -> None:
    """Have a child carry stdout and stderr on, as a file in memory would meet the limit, too."""
    reader, writer = os.pipe()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if os.fork() == 0:
        os.close(writer)
        left = limit
        while (text := os.read(reader, 65536)) and left > 0:
            os.write(2, text[:left])
            left -= len(text)
        os._exit(0)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(reader)
    os.close(writer)
    _open_streams()


def _open_streams() -> None:
    _REPLACED.extend((sys.stdout, sys.stderr))
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
