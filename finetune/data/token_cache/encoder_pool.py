"""Encodes chunks in this process or in workers, with the same samples in the same order."""

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
"""The maximum number of rows of a chunk, and of bytes of its rows that are not parsed yet."""

CHUNKS_BEFORE_WORKERS = 16
"""The number of chunks that are encoded in this process before workers are started."""


class WorkersLost(DataError):
    """An encoding worker exited unexpectedly; the chunks written so far are intact."""


class EncoderPool:
    """Encodes rows with one plan, in this process or in workers that are kept until `close`.

    Starting workers takes time, so the first chunks are encoded in this process; small sets need no workers.
    """

    def __init__(self, plan: EncodingPlan, *, num_workers: int) -> None:
        self._plan = plan
        self._num_workers = num_workers
        self._chunks_before_workers = CHUNKS_BEFORE_WORKERS if num_workers else sys.maxsize
        self._pool: ProcessPoolExecutor | None = None
        self._starting: list[Future[bool]] = []

    def __enter__(self) -> "EncoderPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def encode(self, rows: Iterator[RawRow]) -> Iterator[Chunk]:
        """Yield the chunks in the order of the rows, with only a few chunks of rows in memory.

        Raises DataError naming the row that cannot be encoded, or WorkersLost.
        """
        pending: deque[Future[Chunk]] = deque()
        try:
            for raws in cut_into_chunks(rows):
                pool = self._ready_pool()
                if pool is None:
                    yield encode_chunk(self._plan, raws)
                    continue
                pending.append(pool.submit(_encode_with_plan, raws))
                if len(pending) > 2 * self._num_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise WorkersLost(
                "a tokenization worker exited unexpectedly, perhaps out of memory. Lower data.prepare_workers."
            ) from error

    def close(self) -> None:
        """Shut down the workers after their current chunks."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _ready_pool(self) -> ProcessPoolExecutor | None:
        """Return the pool once a worker is ready, and start it when enough chunks have been encoded without workers."""
        if self._chunks_before_workers > 0:
            self._chunks_before_workers -= 1
            return None
        if self._pool is None:
            # spawn: a forked child would inherit locks held by threads of torch or of the tokenizer
            self._pool = ProcessPoolExecutor(
                self._num_workers,
                get_context("spawn"),
                initializer=_set_plan,
                initargs=(loaded_plugins(), pickle.dumps((self._plan, options_in_use()))),
            )
            self._starting = [self._pool.submit(bool) for _ in range(self._num_workers)]
        return self._pool if self._is_worker_ready() else None

    def _is_worker_ready(self) -> bool:
        return any(worker.done() for worker in self._starting)


def cut_into_chunks(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    """Yield the rows in chunks."""
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
"""The plan of this worker process, sent once."""


def _set_plan(plugins: Sequence[Plugin], pickled: bytes) -> None:
    guard_process()
    ignore_run_signals()
    exit_with_parent()
    load_again(plugins)  # the plan may refer to their code
    plan, options = pickle.loads(pickled)
    use_options(options)
    _plans[:] = [plan]


def _encode_with_plan(raws: Sequence[RawRow]) -> Chunk:
    return encode_chunk(_plans[0], raws)
