"""The end of a process without the interpreter's teardown, in which libraries' threads now and then abort.

What was registered with `atexit` is done all the same: trackers send what they hold, folders for a while are removed.
"""

import atexit
import logging
import os
import sys
import threading
from typing import NoReturn

_SECONDS = 10.0
"""For all that was registered: a handler that waits for another process would wait for ever."""


def leave_process(code: int, *, seconds: float = _SECONDS) -> NoReturn:
    """Do what was registered with `atexit`, flush, and end this process, after so many seconds at the latest.

    On another thread than the main one nothing registered is done: the main one may be stuck, with locks held.
    """
    try:
        if threading.current_thread() is threading.main_thread():
            _do_registered(code, seconds=seconds)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _do_registered(code: int, *, seconds: float) -> None:
    guard = threading.Timer(seconds, _give_up, (code, seconds))
    guard.daemon = True
    guard.start()
    atexit._run_exitfuncs()  # the last registered first; an error in one is printed and does not keep the others
    guard.cancel()


def _give_up(code: int, seconds: float) -> None:
    try:
        print(f"warning: what was registered with atexit took more than {seconds:g} s; it is left", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
