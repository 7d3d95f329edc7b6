"""Chunks encoded in this process or in several: the same samples in the same order either way."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import active_children, get_context

from finetune.data.chunks import Chunk, Recipe, encode_chunk
from finetune.data.rows import RawRow
from finetune.errors import DataError
from finetune.runtime.children import end_with_parent, leave_signals_to_parent

ROWS_PER_CHUNK = 1024
BYTES_PER_CHUNK = 4 << 20
"""A chunk is full when it has so many rows, or when its rows that are not parsed yet have so many bytes."""

CHUNKS_BEFORE_WORKERS = 8
"""So many are encoded here before processes are started."""


class WorkersLost(DataError):
    """A process that encodes is gone; what has been written stays good."""


def encode_chunks(rows: Iterator[RawRow], recipe: Recipe, *, num_workers: int) -> Iterator[Chunk]:
    """Yield the chunks in the order of the rows, holding only a few chunks of rows in memory.

    Workers take seconds to start: the first chunks are encoded here, and a small set needs no others. Raises DataError
    naming the row that cannot be encoded.
    """
    chunks = cut(rows)
    alone = CHUNKS_BEFORE_WORKERS if num_workers else None
    yield from (encode_chunk(recipe, raws) for raws in islice(chunks, alone))
    following = next(chunks, None)
    if following is not None:
        yield from _with_workers(chain([following], chunks), recipe, num_workers=num_workers)


def cut(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
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


def _with_workers(chunks: Iterator[list[RawRow]], recipe: Recipe, *, num_workers: int) -> Iterator[Chunk]:
    others = set(active_children())
    # spawn: a forked child would inherit locks that threads of torch or the tokenizer may hold
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), initializer=_begin, initargs=(recipe,))
    try:
        starting = [pool.submit(_is_started) for _ in range(num_workers)]
        yield from _meanwhile(chunks, recipe, starting)
        yield from _in_order(pool, chunks, num_ahead=2 * num_workers)
    except BrokenProcessPool as error:
        raise WorkersLost(
            "a process that tokenises ended abruptly, perhaps for want of memory. Set fewer data.prepare_workers."
        ) from error
    finally:
        for worker in set(active_children()) - others:
            worker.kill()  # it may be starting still, and has nothing to tidy up
        pool.shutdown(cancel_futures=True)


def _meanwhile(chunks: Iterator[list[RawRow]], recipe: Recipe, starting: Sequence[Future[bool]]) -> Iterator[Chunk]:
    """Encode here until the first worker is ready."""
    while not any(each.done() for each in starting):
        raws = next(chunks, None)
        if raws is None:
            return
        yield encode_chunk(recipe, raws)


def _in_order(pool: ProcessPoolExecutor, chunks: Iterator[list[RawRow]], *, num_ahead: int) -> Iterator[Chunk]:
    waiting: deque[Future[Chunk]] = deque()
    for raws in chunks:
        waiting.append(pool.submit(_encode_with_kept, raws))
        if len(waiting) > num_ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


_recipes: list[Recipe] = []
"""The recipe of a worker process, sent once."""


def _begin(recipe: Recipe) -> None:
    leave_signals_to_parent()
    end_with_parent()
    _recipes[:] = [recipe]


def _is_started() -> bool:
    return True


def _encode_with_kept(raws: Sequence[RawRow]) -> Chunk:
    return encode_chunk(_recipes[0], raws)
