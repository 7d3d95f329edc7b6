"""Work on tensors in several threads, with results that do not depend on the number of threads."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from finetune.runtime.resources import available_bytes, usable_cores

T = TypeVar("T")
R = TypeVar("R")

MAX_THREADS = 16
"""More threads would be limited by memory bandwidth."""


def num_threads_for(item_bytes: int = 0) -> int:
    """Return the number of threads to use: one per core, as far as memory suffices for one item per thread."""
    by_memory = available_bytes() // (2 * item_bytes) if item_bytes else MAX_THREADS
    return max(1, min(usable_cores(), MAX_THREADS, by_memory))


def map_in_threads(work: Callable[[T], R], items: Iterable[T], *, num_threads: int) -> list[R]:
    """Return `work(item)` for every item, in order, without gradients.

    Within an item, torch always computes with one thread, so that the order of every sum is fixed. The first error is
    raised, and items that have not been started by then are skipped.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if num_threads == 1:
            return [_without_gradients(work, item) for item in items]
        with ThreadPoolExecutor(num_threads, initializer=partial(torch.set_num_threads, 1)) as threads:
            futures = [threads.submit(_without_gradients, work, item) for item in items]
            try:
                return [future.result() for future in futures]
            finally:
                threads.shutdown(wait=True, cancel_futures=True)
    finally:
        torch.set_num_threads(before)


def _without_gradients(work: Callable[[T], R], item: T) -> R:
    with torch.no_grad():
        return work(item)
