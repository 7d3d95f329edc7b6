"""Work in a background thread, as a future. No torch."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_background(work: Callable[[], T], *, name: str) -> "Future[T]":
    """Begin the work and return what will hold its value or its error; a process that ends does not wait for it."""
    future: Future[T] = Future()
    threading.Thread(target=_run_into, args=(work, future), name=name, daemon=True).start()
    return future


def run_now(work: Callable[[], T]) -> "Future[T]":
    """Return what holds the value or the error of the work, which has been done."""
    future: Future[T] = Future()
    _run_into(work, future)
    return future


def _run_into(work: Callable[[], T], future: "Future[T]") -> None:
    try:
        value = work()
    except Exception as error:  # for whoever asks for the value
        future.set_exception(error)
    else:
        future.set_result(value)
