"""The watchdog thread, which ends this process when another rank has ended, or when the run hangs or must stop.

It checks every second, and ends the process even if the main thread is blocked in a collective forever.
Rank 0 may work alone without heartbeats while all others wait for it: writing a large model takes longer than the limit
of a step. Then all check the status file instead, which rank 0's watchdog refreshes, on the disk of the run.

In a hang every rank writes a report, so that the ranks behind the others can be named:

hang/rank-00000.txt   the stacks of all its threads
hang/rank-00000.json  its last heartbeat, and the time since then
"""

import faulthandler
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from finetune.errors import Hang, LostContact
from finetune.runtime import distributed
from finetune.runtime.files import atomic
from finetune.runtime.files.read import parse_as, read_regular
from finetune.runtime.run_folder import HANG_FOLDER, format_newer, newer_attempt
from finetune.runtime.supervision import heartbeat
from finetune.runtime.supervision.exit import ProcessExit, find_dead_peers, format_lost_peers
from finetune.runtime.supervision.heartbeat import POINTS
from finetune.runtime.supervision.signals import EXIT_CODES, ReceivedSignals
from finetune.runtime.supervision.status import STOPPED, RankExit, StatusFile, exit_from_error

_TICK_SECONDS = 1.0
_QUIET_SECONDS = 3.0  # without progress, after which the other ranks are checked
_OWN_EXIT_SECONDS = 8.0  # for the main thread to end by itself after an error
_REPORT_SECONDS = 6.0  # for the other ranks to write their reports
_PAUSE_SECONDS = 30.0  # between two checks: then this process was suspended
_MAX_FAILURES = 60  # failed checks in a row, after which the run counts as unwatched
_BACKSTOP_SECONDS = 120.0  # after the limit, if not even this thread can run


class Watchdog:
    """Watches one process of a run."""

    def __init__(
        self, folder: Path, *, status: StatusFile, ending: ProcessExit, note: ReceivedSignals, rank: int, world: int
    ) -> None:
        self._folder = folder
        self._status = status
        self._ending = ending
        self._note = note
        self._rank = rank
        self._world = world
        self._ended_at: float | None = None
        self._limit: float | None = None
        self._watched_since = 0.0
        self._armed_at = float("-inf")
        self._checked_at = time.monotonic()
        self._is_training = False
        self._rank_0_seen: float | None = None
        self._is_over = threading.Event()

    def detect_hangs(self, limit_seconds: float | None) -> None:
        """From now on, end the run after this time without progress; None: never."""
        self._watched_since = time.monotonic()
        self._limit = limit_seconds

    def begin_training(self) -> None:
        """Leave stop signals to the loop from now on; before, there is nothing to save."""
        self._is_training = True

    def stop_before_training(self) -> RankExit | None:
        """Return the exit for a stop signal before the start of training."""
        if self._note.received is None or self._is_training:
            return None
        reason = f"signal {self._note.received.name}"
        return RankExit(STOPPED, self._rank, "Stopped", reason, EXIT_CODES[reason])

    def run(self) -> None:
        """Check until the run is over."""
        num_failures = 0
        while not self._is_over.wait(_TICK_SECONDS):
            try:
                self.check()
                num_failures = 0
            except Exception as error:  # after any error the run must not continue unsupervised
                num_failures += 1
                if num_failures == 1:
                    print(
                        f"warning: the watchdog of rank {self._rank} failed to check the run and tries again: "
                        f"{type(error).__name__}: {error}",
                        file=sys.stderr,
                    )
                if num_failures >= _MAX_FAILURES:
                    self._ending.after(exit_from_error(error, rank=self._rank))

    def stop(self) -> None:
        """Stop checking."""
        self._is_over.set()
        faulthandler.cancel_dump_traceback_later()

    def check(self) -> None:
        """Check the run once."""
        now = time.monotonic()
        if now - self._checked_at > _PAUSE_SECONDS:  # this process was suspended: not a hang
            self._watched_since = now
        self._checked_at = now
        self._note.read_wakeup_pipe()
        if self._rank == 0:
            self._end_if_replaced()
        self._status.refresh()
        if distributed.is_rank_0_alone and self.is_rank_0_alive():
            heartbeat.keep_alive()
        silent = now - max(heartbeat.last_heartbeat_at, self._watched_since)
        if silent > _QUIET_SECONDS or self._note.received:
            self._end_if_replaced()
            self._check_others()
        if self._limit is not None:
            if self._ending.ends_process and now - self._armed_at > min(self._limit, _BACKSTOP_SECONDS) / 2:
                # The interpreter ends the process if even this thread cannot run, because its lock is never released.
                self._armed_at = now
                with suppress(ValueError, OSError, OverflowError):  # standard error may not be a file
                    faulthandler.dump_traceback_later(self._limit + _BACKSTOP_SECONDS, exit=True)
            if silent > self._limit or (silent > _QUIET_SECONDS and (self._folder / HANG_FOLDER).exists()):
                self._end_hang(silent)

    def is_rank_0_alive(self) -> bool:
        """Return whether rank 0's watchdog has written the status file since the last call that returned True."""
        before, self._rank_0_seen = self._rank_0_seen, self._status.refreshed_at()
        return self._rank_0_seen not in (None, before)

    def _end_if_replaced(self) -> None:
        """End this process if a newer attempt has begun, whose ranks need its device."""
        if (newer := newer_attempt()) is not None:
            self._ending.replaced(format_newer(newer))

    def _check_others(self) -> None:
        """End this process if another has ended the run or died, or on a stop signal before the start of training.

        The main thread has a few seconds to exit by itself, since its error has more details.
        """
        first, patience = self._status.first(), _QUIET_SECONDS
        if first is not None and first.rank == self._rank:
            patience = _OWN_EXIT_SECONDS
        elif first is None and (lost := find_dead_peers(self._ending.peers)):
            first = exit_from_error(LostContact(format_lost_peers(lost)), rank=self._rank)
        if stop := self.stop_before_training():
            first, patience = first or stop, 0.0
        if self._note.wants_immediate_exit:
            first = first or exit_from_error(KeyboardInterrupt(), rank=self._rank)
        if first is None:
            self._ended_at = None
            return
        self._ended_at = self._ended_at or time.monotonic()
        if time.monotonic() - self._ended_at >= patience:
            self._ending.after(first)

    def _end_hang(self, silent: float) -> None:
        last = heartbeat.last_heartbeat
        write_hang_report(self._folder, rank=self._rank, point=last.point, step=last.step, silent_seconds=silent)
        deadline = time.monotonic() + _REPORT_SECONDS
        while len(reports := read_reports(self._folder)) < self._world and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)
        error = Hang(
            f"no progress for {silent:.0f} s (run.hang_after_seconds). "
            f"{format_late_ranks(reports, world=self._world)} "
            f"The stacks of every rank are in {self._folder / HANG_FOLDER}."
        )
        self._ending.after(exit_from_error(error, rank=self._rank))


@contextmanager
def running_watchdog(watchdog: Watchdog) -> Iterator[Watchdog]:
    """Run the watchdog in this context."""
    thread = threading.Thread(target=watchdog.run, name="watchdog", daemon=True)
    thread.start()
    try:
        yield watchdog
    finally:
        watchdog.stop()
        thread.join(timeout=5)


_IN_A_STEP = ("data", "forward", "backward", "update.before", "update.after")
_WAITING = ("torch/distributed/", "torch/autograd/graph.py", "deepspeed/comm/")
"""Code in which a rank waits for the others."""


@dataclass(frozen=True)
class HangReport:
    """The state of one rank."""

    rank: int
    host: str
    pid: int
    point: str
    step: int
    silent_seconds: float
    where: str  # file, line and function of the main thread's innermost frame

    @property
    def progress(self) -> tuple[int, int, int]:
        """Return a sort key of the progress: a step follows the saves and evaluations after the previous one."""
        return (self.step, int(self.point in _IN_A_STEP), POINTS.index(self.point) if self.point in POINTS else -1)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (process {self.pid} on {self.host}), {self.silent_seconds:.0f} s after it passed "
            f"`{self.point}` at step {self.step}, in {self.where}"
        )


_REPORT = TypeAdapter(HangReport)


def write_hang_report(folder: Path, *, rank: int, point: str, step: int, silent_seconds: float) -> None:
    """Write the report of this process; `folder` is the run's."""
    path = folder / HANG_FOLDER / f"rank-{rank:05d}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    where = "nowhere"
    if frame is not None:
        where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
    report = HangReport(rank, platform.node(), os.getpid(), point, step, silent_seconds, where)
    atomic.write_json(path.with_suffix(".json"), asdict(report))


def read_reports(folder: Path) -> list[HangReport]:
    """Return the reports that exist and can be read, by rank."""
    reports = []
    for path in sorted((folder / HANG_FOLDER).glob("rank-*.json")):
        with suppress(OSError, ValueError):
            reports.append(parse_as(_REPORT, read_regular(path)))
    return reports


def keep_previous_reports(folder: Path) -> None:
    """Rename the reports of the previous launch to `hang-before`, replacing older ones."""
    older = folder / f"{HANG_FOLDER}-before"
    if (folder / HANG_FOLDER).exists():
        shutil.rmtree(older, ignore_errors=True)
        (folder / HANG_FOLDER).rename(older)


def format_late_ranks(reports: Sequence[HangReport], *, world: int) -> str:
    """Return a sentence with the ranks that the others seem to wait for, and where they are.

    These are the ranks without a report, else those at an earlier point, else those outside of collectives.
    """
    if silent := sorted(set(range(world)) - {report.rank for report in reports}):
        return f"No report from {', '.join(f'rank {rank}' for rank in silent)}."
    furthest = max(report.progress for report in reports)
    outside = [report for report in reports if not any(code in report.where for code in _WAITING)]
    late = [report for report in reports if report.progress < furthest] or outside
    if 0 < len(late) < len(reports):
        return f"Behind the others: {'; and '.join(map(str, late))}."
    return f"Last seen: {reports[0]}{', as all others at this point' if world > 1 else ''}."
