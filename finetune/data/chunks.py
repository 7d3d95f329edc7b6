"""Rows encoded a chunk at a time, in this process or in several: the same bytes either way."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from typing import Literal

import numpy as np

from finetune.data.counts import Counts, total
from finetune.data.features import Features, Outcome
from finetune.data.formats import RowFormat
from finetune.data.rows import RawRow, Row
from finetune.errors import DataError

ROWS_PER_CHUNK = 512


Encode = Callable[[Sequence[Row]], Sequence[Outcome]]
"""From rows to what becomes of each, in their order."""


@dataclass(frozen=True)
class Recipe:
    """How a raw row becomes a sample."""

    format: RowFormat
    encode: Encode
    max_length: int
    over_length: Literal["refuse", "drop", "truncate", "split"]


@dataclass(frozen=True)
class Chunk:
    """The samples of consecutive rows, end to end, with the length of each."""

    values: Mapping[str, np.ndarray]
    lengths: Mapping[str, np.ndarray]  # of the same names
    num_targets: np.ndarray  # of each sample
    counts: Counts


def encode_chunks(rows: Iterator[RawRow], recipe: Recipe, *, num_workers: int) -> Iterator[Chunk]:
    """Yield the chunks in the order of the rows, holding only a few chunks of rows in memory.

    Raises DataError naming the row that cannot be encoded.
    """
    if num_workers == 0:
        for raws in _cut(rows):
            yield encode_chunk(recipe, raws)
        return
    # spawn: a forked child would inherit locks that threads of torch or the tokenizer may hold
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), initializer=_keep, initargs=(recipe,))
    with pool:
        try:
            yield from _in_order(pool, _cut(rows), num_ahead=2 * num_workers)
        except BrokenProcessPool as error:
            raise DataError(
                "a process that tokenises ended abruptly, perhaps for want of memory. Set fewer data.prepare_workers."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def encode_chunk(recipe: Recipe, raws: Sequence[RawRow]) -> Chunk:
    """Return the samples of the rows; raises DataError naming the row that cannot be encoded."""
    encoded = recipe.encode([recipe.format.read(raw) for raw in raws])
    outcomes = [_cut_to_length(recipe, raw, outcome) for raw, outcome in zip(raws, encoded, strict=True)]
    samples = [features for features, _ in outcomes if features is not None]
    names = samples[0].arrays.keys() if samples else ()
    return Chunk(
        values={name: np.concatenate([sample.arrays[name] for sample in samples]) for name in names},
        lengths={name: np.array([len(sample.arrays[name]) for sample in samples], np.int64) for name in names},
        num_targets=np.array([sample.num_targets for sample in samples], np.int64),
        counts=total(counts for _, counts in outcomes),
    )


def _cut_to_length(recipe: Recipe, raw: RawRow, features: Outcome) -> tuple[Features | None, Counts]:
    if isinstance(features, DataError):
        raise DataError(f"{raw.place}: {features}") from features
    if features is None:
        return None, Counts(rows=1, rows_without_target=1, first_without_target=raw.place)
    length = Counts(rows=1, longest=features.length, longest_place=raw.place)
    if features.length <= recipe.max_length:
        return _kept(features, length, raw)
    if recipe.over_length != "truncate":
        return None, length.plus(Counts(long_rows=1))
    shorter = truncated(features, recipe.max_length)
    cut = Counts(
        truncated_rows=1,
        truncated_tokens=features.length - shorter.length,
        truncated_targets=features.num_targets - shorter.num_targets,
    )
    return _kept(shorter, length.plus(cut), raw)


def truncated(features: Features, max_length: int) -> Features:
    """Return the sample with the end of every position-wise array cut off."""
    length = features.length
    arrays = {name: array[:max_length] if len(array) == length else array for name, array in features.arrays.items()}
    return Features(arrays, features.sample_id)


def _kept(features: Features, counts: Counts, raw: RawRow) -> tuple[Features | None, Counts]:
    if features.num_targets == 0:
        return None, counts.plus(Counts(rows_without_target=1, first_without_target=raw.place))
    return features, counts.plus(Counts(samples=1, tokens=features.length, targets=features.num_targets))


def _cut(rows: Iterator[RawRow]) -> Iterator[tuple[RawRow, ...]]:
    while chunk := tuple(islice(rows, ROWS_PER_CHUNK)):
        yield chunk


def _in_order(pool: ProcessPoolExecutor, chunks: Iterator[tuple[RawRow, ...]], *, num_ahead: int) -> Iterator[Chunk]:
    waiting: deque[Future[Chunk]] = deque()
    for raws in chunks:
        waiting.append(pool.submit(_encode_with_kept, raws))
        if len(waiting) > num_ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


_recipes: list[Recipe] = []
"""The recipe of a worker process, sent once."""


def _keep(recipe: Recipe) -> None:
    _recipes[:] = [recipe]


def _encode_with_kept(raws: Sequence[RawRow]) -> Chunk:
    return encode_chunk(_recipes[0], raws)
