"""The exit of processes: of a worker with its parent process, of a rank with its launcher.

A process exits without the interpreter's teardown, in which threads of libraries occasionally abort. Non-daemon threads
are still joined and `atexit` handlers run, so that profiles and coverage are written, trackers flush their data, and
temporary folders are removed. Imports no torch.
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
    """Make a data loading process ignore signals to the run; it ends with its parent process.

    Launchers and Slurm signal whole process groups, and a run whose data loader has died cannot save.
    """
    for number in RUN_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RUN_SIGNALS)  # see `ForkBlockingSignals`


class _BlockingSignals(multiprocessing.context.ForkProcess):
    """A process that blocks these signals from its start until `ignore_run_signals`."""

    def start(self) -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, RUN_SIGNALS)
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class ForkBlockingSignals(multiprocessing.context.ForkContext):
    """Forks data loading processes that survive a signal to the process group during their start."""

    Process = _BlockingSignals


def exit_with_pipe(descriptor: int) -> None:
    """Have this process exit at once when the other end of the pipe is closed, as it is when its holder dies."""

    def wait() -> None:
        os.read(descriptor, 1)
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def exit_with_parent() -> None:
    """End this process when its parent ends in any way; otherwise it would wait for work forever."""
    parent = parent_process()
    assert parent is not None, "this process was not started by multiprocessing"
    sentinel = parent.sentinel

    def exit_after_parent() -> None:
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=exit_after_parent, daemon=True).start()


LAUNCHERS = frozenset({"accelerate", "accelerate-launch", "torchrun", "deepspeed"})
LAUNCHER_MODULES = (
    "accelerate.commands",
    "torch.distributed.run",
    "torch.distributed.launch",
    "deepspeed.launcher",
)
ELASTIC_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Set by torchelastic, through which `accelerate launch` and `torchrun` start several processes."""

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2  # prctl(2)
_LIBC = ctypes.CDLL(None, use_errno=True)  # opened here, since a newly forked process should not


def stop_with_launcher() -> None:
    """Make the kernel send SIGTERM to this process when its launcher dies, so that it saves and ends.

    Does nothing without a launcher, since a run may outlive its shell, or on other systems than Linux.
    """
    parent = os.getppid()
    if sys.platform != "linux" or not (ELASTIC_VARIABLE in os.environ or is_launcher(_command(parent))):
        return
    if parent == 1 and not is_launcher(_command(parent)):  # died before this call; in a container its pid may be 1
        os.kill(os.getpid(), signal.SIGTERM)
    # The parent is the thread that started this process. The setting survives `exec`.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call, so the kernel sends no signal
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def restored_environment() -> Iterator[None]:
    """Restore os.environ at the end of the context."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


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
    """Return an identifier that is shared by all processes of a launch and unique among concurrent launches."""
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
"""Time limit of all handlers together: one could wait for another process forever."""

_STUCK_MAIN_THREAD_SECONDS = 3.0
"""The same if another thread ends the process: the main thread may hang and hold locks that a handler needs."""


def exit_process(code: int, *, seconds: float | None = None) -> NoReturn:
    """Run the handlers registered with `atexit`, flush, and exit this process, after `seconds` at the latest."""
    is_main = threading.current_thread() is threading.main_thread()
    limit = seconds if seconds is not None else _EXIT_HANDLERS_SECONDS if is_main else _STUCK_MAIN_THREAD_SECONDS

    def give_up() -> None:
        try:
            text = f"warning: threads and exit handlers took more than {limit:g} s to end and were abandoned"
            print(text, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    try:
        guard = threading.Timer(limit, give_up)
        guard.daemon = True
        guard.start()
        if is_main:  # pools of `concurrent.futures` finish their tasks; only the main thread may wait for them
            try:
                threading._shutdown()  # type: ignore[attr-defined]
            except Exception as error:  # of a registered callback: it does not affect the others
                print("".join(traceback.format_exception(error)), file=sys.stderr)
        atexit._run_exitfuncs()  # in reverse order of registration; an error in one is only printed
        guard.cancel()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def free_loopback_port() -> int:
    """Return a TCP port that is free right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
