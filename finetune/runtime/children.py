"""What a process that works for another one does: it leaves its signals alone, and ends with it. Imports no torch."""

import os
import signal
import threading
from multiprocessing import connection, parent_process

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals after which a run saves itself and ends; SIGUSR1 saves and goes on."""


def leave_signals_to_parent(worker: int = 0) -> None:
    """Have a process that loads data ignore what is meant for the run; it ends with the process that it serves.

    Launchers and Slurm signal whole groups of processes, and a run whose data loader has died cannot save itself.
    """
    for number in (*STOPPING, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> None:
    """Have this process end when its parent does, however that ends: it would else wait for work forever."""
    parent = parent_process()
    assert parent is not None, "this is no process of multiprocessing"
    threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
