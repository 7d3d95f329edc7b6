"""How processes end: a worker with the process that it serves, a rank with its launcher.

A process exits without the interpreter's teardown, in which libraries' threads now and then abort. What comes before
that in a teardown still happens: non-daemon threads end, and what was registered with `atexit` runs, so that
profiles and coverage are written, trackers send what they hold, temporary folders are removed. Imports no torch.
"""

import atexit
import ctypes
import logging
import multiprocessing.context
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import NoReturn

import psutil

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals after which a run saves a checkpoint and stops; SIGUSR1 saves one and continues."""


RUN_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR1)


def ignore_run_signals(worker: int = 0) -> None:
    """Have a data loading process ignore signals to the run; it ends with the process that it serves.

    Launchers and Slurm signal whole groups of processes, and a run whose data loader has died cannot save itself.
    """
    for number in RUN_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RUN_SIGNALS)  # see `ForkBlockingSignals`


class _BlockingSignals(multiprocessing.context.ForkProcess):
    """A process that has these signals blocked from its first instruction to `ignore_run_signals`."""

    def start(self) -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, RUN_SIGNALS)
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class ForkBlockingSignals(multiprocessing.context.ForkContext):
    """Forks processes that load data: a signal to the whole group in the moment of their start does not end them."""

    Process = _BlockingSignals


def exit_with_parent() -> None:
    """Have this process end when its parent does, however that ends: it would else wait for work forever."""
    parent = parent_process()
    assert parent is not None, "this process was not started by multiprocessing"
    threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


LAUNCHERS = frozenset({"accelerate", "accelerate-launch", "torchrun", "deepspeed"})
LAUNCHER_MODULES = (
    "accelerate.commands",
    "finetune.launch.supervisor.launcher",
    "torch.distributed.run",
    "torch.distributed.launch",
    "deepspeed.launcher",
)
ELASTIC_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Set by torchelastic, through which `accelerate launch` and `torchrun` start several processes."""

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2  # prctl(2)
_LIBC = ctypes.CDLL(None, use_errno=True)  # opened here: a process that has just been forked should not


def stop_with_launcher() -> None:
    """Have the kernel send this process SIGTERM when its launcher dies, so that it saves and ends.

    Nothing happens without a launcher: a run started from a shell may outlive it. Nor elsewhere than on Linux.
    """
    parent = os.getppid()
    if sys.platform != "linux" or not (ELASTIC_VARIABLE in os.environ or is_launcher(_command(parent))):
        return
    if parent == 1 and not is_launcher(_command(parent)):  # died before we asked; in a container it may be 1
        os.kill(os.getpid(), signal.SIGTERM)
    terminate_with_parent(parent)


def terminate_with_parent(parent: int) -> None:
    """Have the kernel send this process SIGTERM when that parent dies; elsewhere than on Linux nothing happens.

    The parent is the thread that has started this process. What this process executes later keeps the request.
    """
    if sys.platform != "linux":
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # died meanwhile: the kernel reports nothing that happened before the call
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def restored_parent_signal() -> Iterator[None]:
    """Restore afterwards which signal this process gets when its parent dies; elsewhere than on Linux nothing."""
    before = ctypes.c_int()
    if sys.platform == "linux":
        _LIBC.prctl(_PR_GET_PDEATHSIG, ctypes.byref(before), 0, 0, 0)
    try:
        yield
    finally:
        if sys.platform == "linux":
            _LIBC.prctl(_PR_SET_PDEATHSIG, before.value, 0, 0, 0)


def is_launcher(command: Sequence[str]) -> bool:
    """Return whether this command line is that of a launcher.

    >>> is_launcher(["/usr/bin/python", "/usr/bin/accelerate", "launch"]), is_launcher(["bash"])
    (True, False)
    """
    return any(Path(word).name in LAUNCHERS or word.startswith(LAUNCHER_MODULES) for word in command[:4])


def launch_id(variables: Mapping[str, str], *, host: str, pid: int, parent: int) -> str:
    """Return a name that all processes of one launch share and no other launch has at the same time."""
    address = variables.get("MASTER_ADDR")
    if address is None or int(variables.get("WORLD_SIZE", "1")) == 1:
        return f"{host}:{pid}"
    endpoint = f"{host}:{parent}" if address in ("127.0.0.1", "localhost", "::1") else address
    return f"{endpoint}:{variables.get('MASTER_PORT')}:{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _command(pid: int) -> list[str]:
    try:
        return list(psutil.Process(pid).cmdline())
    except psutil.Error:
        return []


_EXIT_HANDLERS_SECONDS = 10.0
"""For all handlers together: one that waits for another process could wait forever."""

_STUCK_MAIN_THREAD_SECONDS = 3.0
"""The same where another thread ends the process: the main one may be stuck, with locks held that a handler needs."""


def exit_process(code: int, *, seconds: float | None = None) -> NoReturn:
    """Run the handlers registered with `atexit`, flush, and exit this process, after `seconds` at the latest."""
    is_main = threading.current_thread() is threading.main_thread()
    limit = seconds if seconds is not None else _EXIT_HANDLERS_SECONDS if is_main else _STUCK_MAIN_THREAD_SECONDS
    try:
        _run_exit_handlers(code, seconds=limit, joins_threads=is_main)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run_exit_handlers(code: int, *, seconds: float, joins_threads: bool) -> None:
    """Do what the interpreter does before its teardown, in its order."""
    guard = threading.Timer(seconds, _give_up, (code, seconds))
    guard.daemon = True
    guard.start()
    if joins_threads:  # pools of `concurrent.futures` finish what was submitted; only the main thread may ask for it
        _join_threads()
    atexit._run_exitfuncs()  # the last registered first; an error in one is printed and does not keep the others
    guard.cancel()


def _join_threads() -> None:
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except Exception as error:  # of something that was registered: it keeps no other
        print("".join(traceback.format_exception(error)), file=sys.stderr)


def _give_up(code: int, seconds: float) -> None:
    try:
        text = f"warning: threads and exit handlers took more than {seconds:g} s to end and were abandoned"
        print(text, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def free_port() -> int:
    """Return a TCP port that is free right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
