"""The exit of a run's processes when one of them fails or disappears: the first error is printed once."""

import ctypes
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from multiprocessing.process import BaseProcess

import psutil
import torch.distributed as dist

from finetune.errors import FinetuneError, LostContact, StrategyError, UserError, error_of_type
from finetune.runtime import distributed
from finetune.runtime.optional import no_op
from finetune.runtime.processes import exit_process
from finetune.runtime.supervision.status import STOPPED, RankExit, RankProcess, StatusFile, exit_from_error
from finetune.runtime.text.terminal import format_traceback, printable


def gather_peers() -> list[RankProcess]:
    """Return all processes of the run. Collective."""
    return distributed.gather_objects(RankProcess(distributed.rank(), platform.node(), os.getpid()))


def find_dead_peers(peers: Sequence[RankProcess]) -> list[RankProcess]:
    """Return the dead processes of this host; other hosts' cannot be checked."""
    dead = []
    for peer in peers:
        if peer.host == platform.node():
            try:
                if psutil.Process(peer.pid).status() == psutil.STATUS_ZOMBIE:
                    dead.append(peer)
            except psutil.NoSuchProcess:
                dead.append(peer)
    return dead


_BROKEN = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "ncclRemoteError")
"""Messages of torch when a collective fails because another process has exited."""

_PATIENCE_SECONDS = 3.0


class ProcessExit:
    """The exit of this process, from its main thread or its watchdog; the reason is printed once."""

    ends_process = True  # even if no thread can run any more
    raises = False

    def __init__(
        self,
        status: StatusFile,
        *,
        rank: int,
        leave: Callable[[int], None] | None = None,
        before_exit: Callable[[int], object] = no_op,
    ) -> None:
        self._status = status
        self._rank = rank
        self._prefix = f"[rank {rank}] " if rank else ""
        self._leave = leave or exit_now
        self._before_exit = before_exit  # called with the exit code, unless a newer attempt replaces this process
        self._is_exiting = threading.Lock()
        self.peers: Sequence[RankProcess] = ()

    def exit_after_error(self, error: BaseException) -> None:
        """Print the error, or an earlier one of another rank, and exit."""
        if is_broken_collective(error):
            error = self._lost_contact(error)
        own = exit_from_error(error, rank=self._rank)
        first = self._status.claim_exit(own)
        if first == own and own.state != STOPPED:
            is_bug = not isinstance(error, FinetuneError)
            text = format_traceback(error) if is_bug else f"error: {printable(str(error))}"
            self._exit(own, message=self._prefix + text)
        self._exit(first, message=None)

    def after(self, ended: RankExit) -> None:
        """Exit for this reason, or that of a rank that exited earlier, and print it."""
        self._exit(self._status.claim_exit(ended), message=None)

    def replaced(self, message: str) -> None:
        """Exit without touching the status file, which belongs to a newer attempt; print the message."""
        print(printable(f"error: {message}"), file=sys.stderr, flush=True)
        self._leave(1)

    def _exit(self, first: RankExit, *, message: str | None) -> None:
        if not self._is_exiting.acquire(blocking=False):
            time.sleep(60)  # the other thread is about to exit
        text = message
        if text is None and first.rank == self._rank:
            is_stop = first.state == STOPPED
            text = f"{first}; it ends now." if is_stop else f"{self._prefix}error: {first.message}"
        elif text is None and first.exit_code != UserError.exit_code:  # which that rank has printed
            text = f"rank {self._rank} exits because {first}"
        if text:
            print(printable(text), file=sys.stderr, flush=True)
        code = first.exit_code if first.rank == self._rank or first.state == STOPPED else 1
        try:
            self._before_exit(code)
        finally:
            self._leave(code)

    def _lost_contact(self, error: BaseException) -> BaseException:
        """Return the error for a broken collective, after waiting briefly for the error of the rank that broke it."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline and self._status.first() is None:
            if lost := find_dead_peers(self.peers):
                return LostContact(format_lost_peers(lost))
            time.sleep(0.1)
        return LostContact(f"lost contact with another rank: {str(error).splitlines()[0]}")


class _EndedByWatchdog(BaseException):
    """Raised in the main thread by another one; `RaisedExit.pending` has the reason."""


_STUCK_SECONDS = 5.0
"""Time for the main thread to raise the error that ends the run; within a collective it may never do so."""


class RaisedExit(ProcessExit):
    """The end of a run in a process that outlives it: an exception in the main thread instead of an exit.

    One of several processes still exits if its main thread is stuck in a collective, where nothing can be raised.
    """

    raises = True

    def __init__(self, status: StatusFile, *, rank: int, world: int) -> None:
        super().__init__(status, rank=rank)
        self.ends_process = world > 1
        self._pending: RankExit | None = None
        self._is_over = threading.Event()

    def exit_after_error(self, error: BaseException) -> None:
        """Raise the error of the watchdog or of another rank, if that ended the run."""
        self._is_over.set()
        if isinstance(error, KeyboardInterrupt):
            self._status.claim_exit(exit_from_error(error, rank=self._rank))
            return
        if isinstance(error, _EndedByWatchdog) and self._pending is not None:
            raise error_of_exit(self._pending, rank=self._rank) from None
        if not is_broken_collective(error):
            self._status.claim_exit(exit_from_error(error, rank=self._rank))
            return
        lost = self._lost_contact(error)
        own = exit_from_error(lost, rank=self._rank)
        first = self._status.claim_exit(own)
        raise (lost if first == own else error_of_exit(first, rank=self._rank)) from error

    def after(self, ended: RankExit) -> None:
        """Make the main thread raise this error, unless it raises one itself, as after a signal."""
        if self._pending is not None or ended.state == STOPPED:
            return
        self._pending = self._status.claim_exit(ended)
        main = ctypes.c_ulong(threading.main_thread().ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(_EndedByWatchdog))
        if self.ends_process and not self._is_over.wait(_STUCK_SECONDS):
            self._exit(self._pending, message=None)

    def replaced(self, message: str) -> None:
        """End the run like after a lost contact."""
        self.after(exit_from_error(LostContact(message), rank=self._rank))


def error_of_exit(ended: RankExit, *, rank: int) -> FinetuneError:
    """Return the exception for an end that the status file names; of another rank, with its number."""
    message = ended.message if ended.rank == rank else f"{ended.message} (on rank {ended.rank})"
    return error_of_type(ended.type, message, exit_code=ended.exit_code)


def is_broken_collective(error: BaseException) -> bool:
    """Return whether the error or one of its causes is that another process no longer responds.

    A StrategyError explains the error in its context: nobody was lost.
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, StrategyError):
        if isinstance(seen, dist.DistError):
            return True
        if isinstance(seen, RuntimeError) and any(words in str(seen) for words in _BROKEN):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def format_lost_peers(lost: Sequence[RankProcess]) -> str:
    """Return the message for processes that disappeared without an error."""
    names = " and ".join(map(str, lost))
    return (
        f"lost contact with {names}: killed, or out of memory (see the kernel's log). "
        "The same command resumes from the newest checkpoint."
    )


def kill_children(*, spared: Collection[BaseProcess] = ()) -> None:
    """Kill data loading processes, which ignore signals and would outlive this process by seconds.

    `spared` are children that do not belong to the run. In a caller's process the signal handler is restored.
    """
    is_main = threading.current_thread() is threading.main_thread()
    # torch's handler raises when a data loading process dies
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if is_main else None
    children = [child for child in multiprocessing.active_children() if child not in spared]
    for child in children:
        child.kill()
    if is_main and handler is not None:
        for child in children:
            child.join(_PATIENCE_SECONDS)
        signal.signal(signal.SIGCHLD, handler)


def exit_now(code: int) -> None:
    """Exit and kill the child processes, without waiting for any other rank."""
    try:
        kill_children()
    finally:
        exit_process(code)
