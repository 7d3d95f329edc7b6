"""Chunks encoded in this process or in several: the same samples in the same order either way."""

import pickle
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from finetune.data.rows import RawRow
from finetune.data.token_cache.chunks import Chunk, EncodingPlan, encode_chunk
from finetune.errors import DataError
from finetune.registry.plugins import Plugin, load_again, loaded_plugins
from finetune.registry.table import options_in_use, use_options
from finetune.runtime.processes import exit_with_parent, ignore_run_signals
from finetune.runtime.text.terminal import guard_process

ROWS_PER_CHUNK = 1024
BYTES_PER_CHUNK = 4 << 20
"""A chunk is full with this number of rows, or when its rows that are not parsed yet have this number of bytes."""

CHUNKS_BEFORE_WORKERS = 16
"""The number of rows that are encoded here before processes are started."""


class WorkersLost(DataError):
    """A process that encodes is gone; what has been written stays good."""


class EncoderPool:
    """Encode rows by one plan, in this process or in workers that are kept from call to call, until `close`.

    Workers take a moment to start: the first chunks are encoded here, and a small set needs no others.
    """

    def __init__(self, plan: EncodingPlan, *, num_workers: int) -> None:
        self._recipe = plan
        self._num_workers = num_workers
        self._num_alone = CHUNKS_BEFORE_WORKERS if num_workers else sys.maxsize  # still to be encoded before they start
        self._pool: ProcessPoolExecutor | None = None
        self._starting: list[Future[bool]] = []

    def __enter__(self) -> "EncoderPool":
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()

    def encode(self, rows: Iterator[RawRow]) -> Iterator[Chunk]:
        """Yield the chunks in the order of the rows, holding only a few chunks of rows in memory.

        Raises DataError naming the row that cannot be encoded, and WorkersLost.
        """
        waiting: deque[Future[Chunk]] = deque()
        try:
            for raws in cut_into_chunks(rows):
                if self._is_alone():
                    yield encode_chunk(self._recipe, raws)
                    continue
                assert self._pool is not None
                waiting.append(self._pool.submit(_encode_with_plan, raws))
                if len(waiting) > 2 * self._num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise WorkersLost(
                "a tokenization worker ended abruptly, perhaps out of memory. Lower data.prepare_workers."
            ) from error

    def close(self) -> None:
        """End the workers as soon as they are done with what they have begun."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _is_alone(self) -> bool:
        """Return whether the next chunk is encoded here: until it pays to start workers, and one is ready."""
        if self._num_alone > 0:
            self._num_alone -= 1
            return True
        if self._pool is None:
            self._start()
        return not self._is_ready()

    def _is_ready(self) -> bool:
        return any(worker.done() for worker in self._starting)

    def _start(self) -> None:
        # spawn: a forked child would inherit locks that threads of torch or the tokenizer may hold
        self._pool = ProcessPoolExecutor(
            self._num_workers,
            get_context("spawn"),
            initializer=_set_plan,
            initargs=(loaded_plugins(), pickle.dumps((self._recipe, options_in_use()))),
        )
        self._starting = [self._pool.submit(_is_started) for _ in range(self._num_workers)]


def cut_into_chunks(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    """Yield the rows chunk by chunk."""
    chunk: list[RawRow] = []
    num_bytes = 0
    for row in rows:
        chunk.append(row)
        num_bytes += len(row.content) if isinstance(row.content, bytes) else 0
        if len(chunk) >= ROWS_PER_CHUNK or num_bytes >= BYTES_PER_CHUNK:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


_plans: list[EncodingPlan] = []
"""The plan of a worker process, sent once."""


def _set_plan(plugins: Sequence[Plugin], pickled: bytes) -> None:
    guard_process()
    ignore_run_signals()
    exit_with_parent()
    load_again(plugins)  # the plan may hold what they define
    plan, options = pickle.loads(pickled)
    use_options(options)
    _plans[:] = [plan]


def _is_started() -> bool:
    return True


def _encode_with_plan(raws: Sequence[RawRow]) -> Chunk:
    return encode_chunk(_plans[0], raws)
