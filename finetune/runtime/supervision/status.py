"""status.json: the state of a run for monitoring, with its exit code, which launchers do not preserve.

state       starting, running, finished, stopped or failed
step        steps taken, of `num_steps`
checkpoint  the newest complete one
reason      of a stop: `signal SIGTERM`, `time limit`, `STOP file`, `spot notice`, `interrupted`, ...
error       the first error: its rank, type and message; null unless it failed
ended_by    the rank that ended the run alone; null if all agreed
exit_code   0 finished or stopped by a limit, 129, 130 and 143 by a signal, 143 by a spot notice, 1 an error,
            2 a user error
previous    the end of the previous start: state, reason, step and time; null at the first
on_end      true until the command of `run.on_end` is run; absent without one
restarts    the cost of restarts, checkpoint_interval  advice on saving: see docs/how-to/clusters.md
"""

import errno
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout
from pydantic import TypeAdapter

from finetune.errors import FinetuneError
from finetune.runtime.files import atomic
from finetune.runtime.files.read import read_json
from finetune.runtime.processes import launch_id
from finetune.runtime.progress import Progress
from finetune.runtime.text.redact import redact_known, redact_known_values
from finetune.runtime.text.terminal import format_json


@dataclass(frozen=True)
class RankProcess:
    """One process of the run."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


STATUS_FILE = "status.json"
STARTING, RUNNING, FINISHED, STOPPED, FAILED = "starting", "running", "finished", "stopped", "failed"
INTERRUPTED, KILLED = "interrupted", "killed"

_RANK_EXIT = TypeAdapter(tuple[str, int, str, str, int])

_LOCK = ".status.lock"
_REFRESH_SECONDS = 3.0
_BLOCK_BYTES, _SPARE_BYTES, _MAX_MESSAGE_CHARACTERS = 4096, 2048, 500


@dataclass(frozen=True)
class RankExit:
    """The end of the run by one rank alone, without agreement of the others."""

    state: str  # STOPPED or FAILED
    rank: int
    type: str
    message: str
    exit_code: int

    def __str__(self) -> str:
        if self.state == STOPPED:
            return f"rank {self.rank} was stopped: {self.message}"
        return f"rank {self.rank} failed: {self.message.splitlines()[0] if self.message else self.type}"


def exit_from_error(error: BaseException, *, rank: int) -> RankExit:
    """Return the exit of a rank that raised this error."""
    if isinstance(error, KeyboardInterrupt):
        return RankExit(STOPPED, rank, type(error).__name__, INTERRUPTED, 130)
    code = error.exit_code if isinstance(error, FinetuneError) else 1
    message = str(error) if isinstance(error, FinetuneError) else f"{type(error).__name__}: {error}"
    as_in_file = redact_known(message)
    return RankExit(FAILED, rank, type(error).__name__, as_in_file, code)


def read_status(folder: Path) -> dict[str, Any]:
    """Return the status file of the run in the folder; empty if it cannot be read."""
    try:
        facts = read_json(folder / STATUS_FILE)
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


class StatusFile:
    """The status file of one launch. Rank 0 writes it; the first rank that ends the run alone is recorded in it.

    Monitoring must not stop a run: a status that cannot be written is dropped. On a full disk it overwrites the
    existing file, so that it never shows `running` for a run that has ended.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        me: RankProcess,
        launch: str,
        since: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._rank = rank
        self.launch = launch  # an identifier that all its processes share
        self._since = since  # earlier content belongs to a previous launch
        self._clock = clock
        self._progress: Progress | None = None
        self._refreshed = 0.0
        self.previous: dict[str, Any] = {}  # the end of the previous start; empty at the first
        self._facts: dict[str, Any] = {
            "state": STARTING,
            "step": 0,
            "num_steps": None,
            "checkpoint": None,
            "reason": None,
            "error": None,
            "ended_by": None,
            "exit_code": None,
            "host": me.host,
            "pid": me.pid,
            "ranks": [asdict(me)],
            "previous": None,
        }

    def start(self) -> None:
        """Replace the file of the previous launch."""
        if self._rank == 0:
            with suppress(OSError), self._alone():
                self._facts["previous"] = previous_end(read_status(self._folder))
                self.previous = self._facts["previous"] or {}
                self._write(self._facts)

    def add(self, values: Mapping[str, Any]) -> None:
        """Add facts, also after the end of the run."""
        self._facts |= values
        if self._rank == 0:
            with suppress(OSError), self._alone():
                is_ours = self.first() is None
                self._write(self._facts | self._step() if is_ours else read_status(self._folder) | dict(values))

    def run(self, progress: Progress, *, num_steps: int) -> None:
        """Record that training begins; from now on the step is read from `progress`."""
        self._progress = progress
        self._facts |= {"state": RUNNING, "num_steps": num_steps}
        self._keep()

    def checkpoint(self, path: str) -> None:
        """Record the newest complete checkpoint."""
        self._facts["checkpoint"] = path
        self._keep()

    def refresh(self) -> None:
        """Write the current step, at most every few seconds."""
        if self._clock() - self._refreshed >= _REFRESH_SECONDS:
            self._keep()

    def end(self, state: str, *, reason: str, exit_code: int) -> None:
        """Record the end of the run that all ranks agreed on."""
        self._facts |= {"state": state, "reason": reason, "exit_code": exit_code}
        self._keep()

    def claim_exit(self, ended: RankExit) -> RankExit:
        """Record that this rank ends the run, unless another did so before; return the first such exit."""
        try:
            with self._alone():
                first = self.first()
                facts = read_status(self._folder)
                is_ours = facts.get("launch") == self.launch  # otherwise the file belongs to another launch
                if first is None and is_ours:
                    error = {"rank": ended.rank, "type": ended.type, "message": ended.message}
                    end = {
                        "state": ended.state,
                        "reason": ended.message if ended.state == STOPPED else None,
                        "error": error if ended.state == FAILED else None,
                        "ended_by": ended.rank,
                        "exit_code": ended.exit_code,
                    }
                    self._write(facts | (self._facts if self._rank == 0 else {}) | self._step() | end)
                return first or ended
        except OSError:
            return ended

    def first(self) -> RankExit | None:
        """Return the exit of the rank that ended the run alone, if any."""
        facts = read_status(self._folder)
        try:
            if facts.get("launch") != self.launch or facts.get("ended_by") is None or facts["time"] < self._since:
                return None
            error = facts["error"] or {"type": "Stopped", "message": facts["reason"]}
            ended = (facts["state"], facts["ended_by"], error["type"], error["message"], facts["exit_code"])
            return RankExit(*_RANK_EXIT.validate_python(ended))
        except (KeyError, TypeError, ValueError):  # damaged, or written by another program
            return None

    def refreshed_at(self) -> float | None:
        """Return when rank 0 last wrote the file, by its clock (unix seconds); None if that cannot be read."""
        facts = read_status(self._folder)
        return facts["time"] if facts.get("launch") == self.launch and isinstance(facts.get("time"), float) else None

    def _keep(self) -> None:
        if self._rank != 0:
            return
        self._refreshed = self._clock()
        with suppress(OSError), self._alone():
            if self.first() is None:
                self._write(self._facts | self._step())

    def _step(self) -> dict[str, int]:
        return {"step": self._progress.step} if self._progress is not None else {}

    def _write(self, facts: dict[str, Any]) -> None:
        """Replace the file, or overwrite it on a full disk; raises OSError if the facts do not fit."""
        now = self._clock()
        updated = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
        facts = redact_known_values({**facts, "launch": self.launch, "updated": updated, "time": now})
        content = format_json(facts, indent=2).encode(errors="backslashreplace")
        # padded with blanks, to have space for the final state on a full disk
        size = -(-(len(content) + _SPARE_BYTES) // _BLOCK_BYTES) * _BLOCK_BYTES
        padding = b" " * (size - len(content) - 1) + b"\n"
        path = self._folder / STATUS_FILE
        with suppress(OSError):
            atomic.write_bytes(path, content + padding)
            return
        limit = _MAX_MESSAGE_CHARACTERS
        error = facts["error"] and {**facts["error"], "message": facts["error"]["message"][:limit]}
        shorter = {**facts, "error": error, "reason": facts["reason"] and facts["reason"][:limit]}
        with path.open("r+b") as file:
            available = os.fstat(file.fileno()).st_size - 1
            for candidate in (facts, shorter, {**shorter, "ranks": []}):
                content = format_json(candidate).encode(errors="backslashreplace")
                if len(content) <= available:
                    file.write(content + b" " * (available - len(content)) + b"\n")
                    return
        raise OSError(errno.ENOSPC, "no space left for the final state of the run", str(path))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        lock = FileLock(self._folder / _LOCK, timeout=5)
        try:
            lock.acquire()
        except (Timeout, NotImplementedError, OSError):
            yield  # without locks, two ranks that fail at the same time may overwrite each other
            return
        try:
            yield
        finally:
            lock.release()


def previous_end(status: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the end of the launch with these facts; if it never trained, that of the launch before it."""
    if status.get("num_steps") is None:
        before = status.get("previous")
        return dict(before) if isinstance(before, dict) else None
    error, state = status.get("error"), status.get("state")
    name = error.get("type") if isinstance(error, dict) else None
    is_killed = state in (STARTING, RUNNING)
    reason = KILLED if is_killed else name or status.get("reason") or state
    return {
        "state": FAILED if is_killed else state,
        "reason": str(reason)[:_MAX_MESSAGE_CHARACTERS],
        "step": status.get("step"),
        "time": status.get("time"),
    }


num_launches = 0
"""Runs of this process: each is another launch, whose ranks ignore the end of the previous one."""


def open_status_file(folder: Path, *, rank: int) -> StatusFile:
    """Return the status of the launch that this process belongs to."""
    me = RankProcess(rank, platform.node(), os.getpid())
    launch = launch_id(os.environ, host=me.host, pid=me.pid, parent=os.getppid())
    launch += f"#{num_launches}" if num_launches > 1 else ""
    return StatusFile(folder, rank=rank, me=me, launch=launch, since=psutil.Process().create_time() - 2)
