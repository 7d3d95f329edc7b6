"""Work in a background thread, as a future. No torch."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_background(work: Callable[[], T], *, name: str) -> "Future[T]":
    """Start the work in a daemon thread and return its future; the end of the process does not wait for it."""
    future: Future[T] = Future()
    threading.Thread(target=_run_into, args=(work, future), name=name, daemon=True).start()
    return future


def run_now(work: Callable[[], T]) -> "Future[T]":
    """Do the work now and return its value or its error as a completed future."""
    future: Future[T] = Future()
    _run_into(work, future)
    return future


def _run_into(work: Callable[[], T], future: "Future[T]") -> None:
    try:
        value = work()
    except Exception as error:  # raised when the result is read
        future.set_exception(error)
    else:
        future.set_result(value)
