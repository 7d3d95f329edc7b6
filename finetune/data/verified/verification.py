"""Blocks verified in the background, by threads of this process, from the moment a set is opened."""

import threading
import time
from collections.abc import Iterator, Sequence

from finetune.data.verified.arrays import Block, StoredArray
from finetune.runtime.cores import usable_cores
from finetune.runtime.sealed import Damaged

MOST_THREADS = 4
"""Digests are made as fast as memory is read: more threads gain nothing."""


class Verification:
    """Reads all blocks of the arrays once; the first that is damaged ends it."""

    def __init__(self, arrays: Sequence[StoredArray]) -> None:
        self._arrays = arrays
        self._problem: str | None = None
        self._lock = threading.Lock()
        self._all = tuple(block for array in arrays for block in array.blocks())
        self._blocks: Iterator[tuple[int, Block]] = iter(enumerate(self._all))
        self.number = -1  # of the block that is damaged
        self._threads: list[threading.Thread] = []

    @property
    def problem(self) -> str | None:
        """Return what has been found to be damaged by now."""
        return self._problem

    @property
    def size_bytes(self) -> int:
        """Return how many bytes there are to be read."""
        return sum(array.size_bytes for array in self._arrays)

    def verify_only(self, number: int) -> None:
        """Read one block; raises Damaged."""
        self._all[number].verify()
        self.close()

    def run(self) -> None:
        """Read them all in this thread."""
        self._verify()
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        for array in self._arrays:
            array.close()

    def start(self) -> None:
        """Begin, and return at once."""
        num_threads = max(1, min(MOST_THREADS, usable_cores() - 1))
        self._threads = [threading.Thread(target=self._verify, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all is verified or something is found to be damaged; return whether that is so by then."""
        end = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        is_over = not any(thread.is_alive() for thread in self._threads)
        if is_over:
            self.close()
        return is_over

    def _verify(self) -> None:
        while self._problem is None:
            with self._lock:
                number, block = next(self._blocks, (-1, None))
            if block is None:
                return
            try:
                block.verify()
            except Damaged as damage:
                self.number, self._problem = number, str(damage)
