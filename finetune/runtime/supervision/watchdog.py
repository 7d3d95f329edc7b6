"""The watchdog thread, which ends this process when another rank has ended, or when the run hangs or must stop.

It checks every second, and ends the process even if the main thread is blocked in a collective forever.
Rank 0 may work alone without heartbeats while all others wait for it: writing a large model takes longer than the limit
of a step. Rank 0 then checks the CPU time of its main thread; the others check the status file, which rank 0 refreshes
until it ends or detects that it hangs.
"""

import faulthandler
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from finetune.errors import Hang, LostContact
from finetune.runtime import distributed
from finetune.runtime.run_folder import HANG_FOLDER
from finetune.runtime.supervision import hang, heartbeat
from finetune.runtime.supervision.attempt import format_newer, newer_attempt
from finetune.runtime.supervision.exit import ProcessExit, find_dead_peers, format_lost_peers
from finetune.runtime.supervision.signals import EXIT_CODES, ReceivedSignals
from finetune.runtime.supervision.status import STOPPED, RankExit, StatusFile, exit_from_error

_LEAST_CPU_SECONDS = 0.01
"""CPU time of a working main thread, also while writing to disk; waiting for a dead disk or a lock takes none."""


class Activity(Protocol):
    """A sign of progress of rank 0."""

    def has_progressed(self) -> bool:
        """Return whether there was any activity since the last call that returned True."""


class OwnActivity:
    """The CPU time of the main thread of this process, rank 0."""

    def __init__(self) -> None:
        self._seen = _main_thread_seconds()

    def has_progressed(self) -> bool:
        """Return whether the main thread has worked."""
        now = _main_thread_seconds()
        if now - self._seen < _LEAST_CPU_SECONDS:
            return False
        self._seen = now
        return True


class OthersActivity:
    """The status file of the run, which rank 0 refreshes."""

    def __init__(self, status: StatusFile) -> None:
        self._status = status
        self._seen: float | None = None

    def has_progressed(self) -> bool:
        """Return whether rank 0 has refreshed the file."""
        before, self._seen = self._seen, self._status.refreshed_at() or self._seen
        return self._seen != before


def _main_thread_seconds() -> float:
    """Return the CPU time of the main thread; without a clock for it, the current time, as if it worked."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic()
    return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))


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
        self._rank_0: Activity = OwnActivity() if rank == 0 else OthersActivity(status)
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
        if distributed.is_rank_0_alone() and self._rank_0.has_progressed():
            heartbeat.keep_alive()
        silent = now - max(heartbeat.last_heartbeat_at(), self._watched_since)
        if silent > _QUIET_SECONDS or self._note.received:
            self._end_if_replaced()
            self._check_others()
        if self._limit is not None:
            if self._ending.ends_process:
                self._arm(self._limit)
            if silent > self._limit or (silent > _QUIET_SECONDS and (self._folder / HANG_FOLDER).exists()):
                self._end_hang(silent)

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
        last = heartbeat.last_heartbeat()
        hang.write_report(self._folder, rank=self._rank, point=last.point, step=last.step, silent_seconds=silent)
        deadline = time.monotonic() + _REPORT_SECONDS
        while len(reports := hang.read_reports(self._folder)) < self._world and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)
        error = Hang(
            f"no progress for {silent:.0f} s (run.hang_after_seconds). "
            f"{hang.format_blocking_ranks(reports, world=self._world)} "
            f"The stacks of every rank are in {self._folder / HANG_FOLDER}."
        )
        self._ending.after(exit_from_error(error, rank=self._rank))

    def _arm(self, limit: float) -> None:
        """Make the interpreter end the process if even this thread cannot run, because its lock is never released."""
        if time.monotonic() - self._armed_at > min(limit, _BACKSTOP_SECONDS) / 2:
            self._armed_at = time.monotonic()
            with suppress(ValueError, OSError, OverflowError):  # standard error may not be a file
                faulthandler.dump_traceback_later(limit + _BACKSTOP_SECONDS, exit=True)


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
