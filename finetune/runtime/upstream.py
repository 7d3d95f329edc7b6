"""Workarounds for torch, huggingface_hub and glibc that any part of a run needs. Imports no torch.

**Locks of extensions.** torch waits for the lock of an extension that DeepSpeed compiles silently and forever, even if
its owner is dead (pytorch#189245; fixed after 2.13 by pytorch#190543). It (`torch/utils/file_baton.py`) creates a file
`lock` in the folder of a build, keeps it open while it compiles and removes it afterwards. So its owner is the process
of this machine that has it open, and a lock that no process has open has no owner, unless a shared file system or a
container hides it. A thread reports the lock that the run waits for, and removes the locks of dead builds. From torch
2.14 on, the file remains after every build and blocks nobody, since the kernel holds the lock.

**Retries of the hub.** huggingface_hub retries for most of a minute before it gives up on an unreachable hub.

**Freed memory.** On CPUs torch allocates each tensor by `malloc`, and glibc returns large blocks to the kernel when
they are freed, so every step pays for its pages again.

**Dead loader processes.** torch's first DataLoader with workers in a process handles SIGCHLD from then on.

**oneDNN's primitives.** On CPUs torch compiles a primitive for each new shape, and oneDNN keeps 1,024 of them.
"""

import ctypes
import functools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import psutil
from filelock import FileLock
from huggingface_hub import constants

BUILDING, ABANDONED, UNKNOWN = "building", "abandoned", "unknown"

_SHARED_FILE_SYSTEM = re.compile(
    "nfs|cifs|smb|lustre|gpfs|beegfs|ceph|fuse|9p|afs|pvfs|weka|panfs|virtiofs|gfs|ocfs|orangefs|glusterfs"
)
"""Beginnings of the names of file systems that other machines may write to."""

_COMPILERS = ("ninja", "nvcc", "cicc", "ptxas", "cc1plus", "c++", "g++", "clang", "hipcc", "icpx", "ld")
_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"), Path("/var/run/secrets/kubernetes.io"))
_RECHECK_SECONDS = 1.0
"""Between two checks: an owner closes the file a moment before it removes it."""


@dataclass(frozen=True)
class BuildLock:
    """The lock of one build, and its owner."""

    path: Path
    state: str  # BUILDING, ABANDONED or UNKNOWN
    owner: str  # a process, or why it is unknown

    def __str__(self) -> str:
        if self.state == BUILDING:
            return f"{self.path} is held by {self.owner}, which compiles this extension."
        if self.state == ABANDONED:
            return f"{self.path} was left by a build that was killed: every later run would wait for it."
        return (
            f"the owner of {self.path} is unknown: {self.owner}. A run that needs this extension waits until the file "
            "is gone. If nothing is compiling there, delete it."
        )


def extensions_folder() -> Path:
    """Return the folder in which torch builds the extensions that DeepSpeed compiles."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")).expanduser()


def torch_waits_for_locks() -> bool:
    """Return whether this torch waits for the lock file of a killed build."""
    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) < (2, 14)


def build_locks(folder: Path) -> list[BuildLock]:
    """Return all locks of builds in the folder, by path; empty if torch does not wait for them."""
    if not torch_waits_for_locks():
        return []
    return [inspect_lock(path) for path in sorted(folder.glob("**/lock")) if path.is_file()]


def inspect_lock(path: Path) -> BuildLock:
    """Return the lock with the known facts about its owner.

    That is a process that has the lock open, or that still compiles in its folder after its parent's death.
    """
    lock, folder = path.resolve(), path.parent.resolve()
    for process in psutil.process_iter(["pid", "name"]):
        try:
            is_owner = any(Path(file.path) == lock for file in process.open_files())
            name = str(process.info["name"])
            if is_owner or (name.startswith(_COMPILERS) and Path(process.cwd()) == folder):
                return BuildLock(path, BUILDING, f"process {process.pid} ({name})")
        except (psutil.Error, OSError):  # it has ended, or belongs to another user
            continue
    if reason := _why_unknown(path):
        return BuildLock(path, UNKNOWN, reason)
    return BuildLock(path, ABANDONED, "nobody")


def remove_abandoned(path: Path, *, pause: Callable[[float], None] = time.sleep) -> bool:
    """Remove the lock if nobody holds it, checked twice; return whether this process removed it."""
    with suppress(OSError), FileLock(path.with_name(".finetune-build.lock"), timeout=10):
        seen = path.stat().st_ino
        if inspect_lock(path).state == ABANDONED:
            pause(_RECHECK_SECONDS)
            if inspect_lock(path).state == ABANDONED and path.stat().st_ino == seen:
                path.unlink()
                return True
    return False


def awaited_lock(frame: FrameType | None) -> Path | None:
    """Return the lock that a thread waits for, according to its innermost frame; None if it waits for none."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "wait" and code.co_filename.endswith("file_baton.py"):
            return Path(str(frame.f_locals["self"].lock_file_path))
        frame = frame.f_back
    return None


def _why_unknown(path: Path) -> str | None:
    """Return why an owner could be hidden from this process; None if it would be visible."""
    try:
        uid = path.stat().st_uid
    except OSError:
        return "the file cannot be read"
    if os.geteuid() not in (0, uid):
        return "it belongs to another user, whose processes cannot be inspected"
    mount, file_system = _mount(path)
    if _SHARED_FILE_SYSTEM.match(file_system):
        return f"it is on a {file_system} file system, which another machine may write to"
    if mount != Path("/") and any(mark.exists() for mark in _CONTAINER_MARKS):
        return f"it is on {mount}, which other containers may share"
    return None


def _mount(path: Path) -> tuple[Path, str]:
    resolved = path.resolve()
    mounts = [(Path(partition.mountpoint), partition.fstype) for partition in psutil.disk_partitions(all=True)]
    containing = [(mount, file_system) for mount, file_system in mounts if resolved.is_relative_to(mount)]
    return max(containing, key=lambda partition: len(partition[0].parts), default=(Path("/"), ""))


_CHECK_SECONDS = 5.0
_LOG_SECONDS = 30.0

Log = Callable[[str], None]


def clear_build_locks(*, log: Log) -> None:
    """Remove the locks of killed builds and log that; warn about locks whose owner is unknown."""
    for lock in build_locks(extensions_folder()):
        if lock.state != ABANDONED:
            log(f"{'note' if lock.state == BUILDING else 'warning'}: {lock}")
        elif remove_abandoned(lock.path):
            log(f"removed {lock}")


class BuildLockWatcher(threading.Thread):
    """Watches the main thread: while it waits for the lock of a build, the owner of the lock is logged."""

    def __init__(self, *, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(name="build locks", daemon=True)
        self._log = log
        self._clock = clock
        self._main = threading.main_thread().ident or 0
        self._since: dict[Path, float] = {}
        self._logged: dict[Path, float] = {}

    def run(self) -> None:
        """Check every few seconds, until the process ends."""
        while True:
            time.sleep(_CHECK_SECONDS)
            self.look()

    def look(self) -> None:
        """Check once: remove an abandoned lock, which ends the wait, and log any other."""
        path = awaited_lock(sys._current_frames().get(self._main))
        if path is None:
            self._since.clear()
            return
        now = self._clock()
        waited = now - self._since.setdefault(path, now)
        lock = inspect_lock(path)
        if lock.state == ABANDONED and remove_abandoned(path):
            self._log(f"removed {lock}")
        elif lock.state != ABANDONED and now - self._logged.get(path, float("-inf")) >= _LOG_SECONDS:
            self._logged[path] = now
            self._log(f"waiting for an extension to be compiled, for {waited:.0f} s so far: {lock}")


@contextmanager
def without_hub_retries(*, is_local: bool) -> Iterator[None]:
    """In this context, send no request to the hub if the files are local or the hub is unreachable.

    `local_files_only` is not enough: transformers 5.23 does not pass it on when it looks for an adapter, and
    huggingface_hub 2.4 fetches a list of agents before its first download (`utils/_detect_agent.py`). The constant that
    HF_HUB_OFFLINE=1 sets prevents both.
    """
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or is_local or is_offline()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_MAX_INT = 2**31 - 1
_OLD_MMAP_MAXIMUM = 32 * 2**20


def keep_freed_memory() -> bool:
    """Make this process keep and reuse the memory that it frees; return False if malloc is not glibc's.

    glibc maps a block above a threshold (from 128 KiB, raised up to 32 MiB by freed blocks) separately and unmaps it
    when it is freed, and returns the end of the heap to the kernel if more than twice that is free. Which tensors of a
    step this affects depends on the order of all earlier allocations: under ZeRO-2 up to 4,900 page faults per step, or
    none, varying from start to start (glibc 2.36, `sysmalloc`, `systrim`). glibc before 2.35 accepts no threshold above
    32 MiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    raised = mallopt(_MMAP_THRESHOLD, _MAX_INT) or mallopt(_MMAP_THRESHOLD, _OLD_MMAP_MAXIMUM)
    return bool(raised and mallopt(_TRIM_THRESHOLD, _MAX_INT))


_LOADER_SIGNALS = "torch.utils.data._utils.signal_handling"


@contextmanager
def restored_child_signal() -> Iterator[None]:
    """Restore the handler of SIGCHLD, and make torch set its own again for the next DataLoader with workers.

    torch records in a global that it has set it (`_set_SIGCHLD_handler` in torch/utils/data/_utils, 2.11 to 2.13).
    """
    loader = sys.modules.get(_LOADER_SIGNALS)
    handler, is_set = signal.getsignal(signal.SIGCHLD), getattr(loader, "_SIGCHLD_handler_set", False)
    try:
        yield
    finally:
        loader = sys.modules.get(_LOADER_SIGNALS)
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGCHLD, handler)
            if loader is not None:
                vars(loader)["_SIGCHLD_handler_set"] = is_set


_CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")
_NUM_PRIMITIVES = 64


def bound_primitive_cache(variables: MutableMapping[str, str]) -> None:
    """Limit the number of primitives that oneDNN keeps, unless the user has set it.

    Steps of varying lengths need primitives of ever new shapes, which are hardly ever used again. Their code lies
    between the tensors in malloc's heap and fragments it: memory grew for hundreds of steps. oneDNN 3.12 reads the
    variable with the first primitive of a process; torch exports no function for it.
    """
    if not any(name in variables for name in _CAPACITIES):
        variables[_CAPACITIES[0]] = str(_NUM_PRIMITIVES)


PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@functools.cache
def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE is set or no connection to the hub opens within 3 seconds.

    Checked once per process, because huggingface_hub retries for most of a minute before it gives up.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}:
        return True
    if any(os.environ.get(name) for name in PROXIES):
        return False
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        socket.create_connection((endpoint.hostname or "huggingface.co", port), timeout=3).close()
    except OSError:
        return True
    return False
