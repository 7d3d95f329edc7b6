"""Workarounds for torch, oneDNN, huggingface_hub and glibc that any part of a run needs. Imports no torch.

**Locks of extensions.** torch waits for the lock of an extension that DeepSpeed compiles silently and forever, even if
its owner is dead (pytorch#189245; fixed after 2.13 by pytorch#190543). It (`torch/utils/file_baton.py`) creates a file
`lock` in the folder of a build, keeps it open while it compiles and removes it afterwards. A lock that no
process of this machine has open was left by a killed build, unless a shared file system or a container hides its owner:
it is removed. A thread reports the lock that the run waits for. From torch 2.14 on, the file blocks nobody.
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
from huggingface_hub import constants

BUILDING, ABANDONED = "building", "abandoned"

_SHARED_FILE_SYSTEM = re.compile(
    "nfs|cifs|smb|lustre|gpfs|beegfs|ceph|fuse|9p|afs|pvfs|weka|panfs|virtiofs|gfs|ocfs|orangefs|glusterfs"
)
"""Beginnings of the names of file systems that other machines may write to."""

_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"), Path("/var/run/secrets/kubernetes.io"))

_MIN_AGE_SECONDS = 10.0  # of a lock that is removed: its owner may just be about to open it
_CHECK_SECONDS = 5.0
_LOG_SECONDS = 30.0

Log = Callable[[str], None]


@dataclass(frozen=True)
class BuildLock:
    """The lock of one build, and the process of this machine that holds it."""

    path: Path
    owner: str | None

    @property
    def state(self) -> str:
        """Return BUILDING or ABANDONED; on a shared file system an abandoned one may be another machine's."""
        return ABANDONED if self.owner is None else BUILDING

    def __str__(self) -> str:
        if self.owner is not None:
            return f"{self.path} is held by {self.owner}, which compiles this extension."
        return (
            f"no process of this machine holds {self.path}. Unless another machine compiles there, it was left by a "
            "build that was killed: delete it, since every later run waits for it."
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
    """Return the lock with the process of this machine that has it open, if there is one."""
    lock = path.resolve()
    for process in psutil.process_iter(["pid", "name"]):
        with suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
            if any(Path(file.path) == lock for file in process.open_files()):
                return BuildLock(path, f"process {process.pid} ({process.info['name']})")
    return BuildLock(path, None)


def remove_abandoned_lock(lock: BuildLock, *, log: Log) -> bool:
    """Remove the lock if its owner is dead for certain, log that, and return whether it was removed."""
    path = lock.path.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    mount = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    if lock.owner is not None or mount is None or _SHARED_FILE_SYSTEM.match(mount.fstype):
        return False
    if mount.mountpoint != "/" and any(mark.exists() for mark in _CONTAINER_MARKS):
        return False
    with suppress(OSError):
        facts, uid = path.stat(), os.geteuid()  # processes of other users cannot be inspected
        if time.time() - facts.st_mtime > _MIN_AGE_SECONDS and uid in (0, facts.st_uid):
            path.unlink()
            log(f"removed {lock.path}, which was left by a build that was killed")
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


class BuildLockWatcher(threading.Thread):
    """Watches the main thread: while it waits for the lock of a build, that is logged with the lock's owner."""

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
        """Check once, and log the lock that the main thread waits for."""
        path = awaited_lock(sys._current_frames().get(self._main))
        if path is None:
            self._since.clear()
            return
        lock, now = inspect_lock(path), self._clock()
        if remove_abandoned_lock(lock, log=self._log):
            return
        waited = now - self._since.setdefault(path, now)
        if now - self._logged.get(path, float("-inf")) >= _LOG_SECONDS:
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
