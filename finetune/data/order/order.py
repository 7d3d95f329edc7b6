"""The order of samples as a pure function of (seed, epoch, position), and views: samples by id in such an order.

A position counts over the whole world. An id encodes the source, the window of a stream, and the index of the sample in
one integer. For a job with a single source that is not a stream, the ids are the indices of its prepared set.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from finetune.data.features import Features
from finetune.runtime.seeds import derive_seed

LengthsOf = Callable[[np.ndarray], np.ndarray]
"""From sample ids to the number of tokens of each."""


class Order(ABC):
    """An endless sequence of positions with one or more samples each; a pure function of the position."""

    num_positions: int | None  # of one epoch; None if it is unknown, as for a stream

    @abstractmethod
    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the ids (int64) at positions [start, stop) in pieces of any size, such as epoch by epoch."""

    def samples(self, start: int, stop: int) -> np.ndarray:
        """Return the ids (int64) of all samples at positions [start, stop), in the order of the positions."""
        return np.concatenate([np.zeros(0, np.int64), *self.pieces(start, stop)])

    def cut(self, start: int, stop: int, size: int) -> Iterator[np.ndarray]:
        """Yield the same ids in pieces of `size` positions each: the contents of the microbatches."""
        return (self.samples(first, min(first + size, stop)) for first in range(start, stop, size))


@dataclass(frozen=True)
class SetOrder(Order):
    """An endless sequence of sample ids; each epoch contains every sample once, at a position of its own."""

    seed: int
    num_positions: int
    shuffle: bool = True

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the sample ids at positions [start, stop), epoch by epoch."""
        while start < stop:
            epoch, first = divmod(start, self.num_positions)
            last = min(self.num_positions, first + stop - start)
            yield _epoch_ids(self.seed, self.num_positions, epoch if self.shuffle else None)[first:last]
            start += last - first


def steps_for_tokens(
    order: Order, lengths_of: LengthsOf, *, epoch_tokens: int | None, global_batch_size: int, tokens: int
) -> int:
    """Return the smallest number of optimizer steps whose samples have at least `tokens` (>= 1) tokens in total.

    With `epoch_tokens`, whole epochs are not counted sample by sample; None if epochs may differ.
    """
    start, missing = 0, tokens
    if epoch_tokens is not None and order.num_positions is not None:
        whole_epochs, rest = divmod(tokens - 1, epoch_tokens)
        start = whole_epochs * order.num_positions // global_batch_size * global_batch_size
        earlier = order.samples(start, whole_epochs * order.num_positions)
        missing = rest + 1 + int(lengths_of(earlier).sum())
    while missing > 0:
        missing -= int(lengths_of(order.samples(start, start + global_batch_size)).sum())
        start += global_batch_size
    return start // global_batch_size


def permutation(size: int, *parts: int | str) -> np.ndarray:
    """Return a permutation derived from the parts, using raw bits of PCG64, which are stable across NumPy (NEP 19)."""
    if size == 1:
        return np.zeros(1, np.int64)
    return np.concatenate(shuffled_rows(1, size, *parts))


def shuffled_rows(num_rows: int, size: int, *parts: int | str) -> np.ndarray:
    """Return `num_rows` permutations, one per row, derived from the parts."""
    bits = np.random.PCG64(derive_seed(*parts)).random_raw(num_rows * size).reshape(num_rows, size)
    return np.argsort(bits, kind="stable").astype(np.int64)


@lru_cache(maxsize=2)
def _epoch_ids(seed: int, num_samples: int, epoch: int | None) -> np.ndarray:
    """Return the ids in the order of the epoch, read-only; the same in every epoch if unshuffled (None)."""
    unshuffled = np.arange(num_samples, dtype=np.int64)
    ids = unshuffled if epoch is None else permutation(num_samples, seed, "order", epoch)
    ids.setflags(write=False)
    return ids


INDEX_BITS, WINDOW_BITS = 24, 24
"""A window of a stream has up to 16 million samples, a stream up to 16 million windows."""


class SourceSampleId(NamedTuple):
    """The two parts of a sample id; for a source that is not a stream, `within` is the index in its prepared set."""

    source: int
    within: int  # the sample's id within its source


def source_offset(source: int) -> int:
    """Return the offset that is added to ids within this source."""
    return source << (INDEX_BITS + WINDOW_BITS)


def window_offset(window: int) -> int:
    """Return the offset that is added to indices within this window of a stream."""
    return window << INDEX_BITS


def split_sample_id(sample_id: int) -> SourceSampleId:
    """Return the source and the id within that source.

    >>> split_sample_id(source_offset(2) + 7)
    SourceSampleId(source=2, within=7)
    """
    source = sample_id >> (INDEX_BITS + WINDOW_BITS)
    return SourceSampleId(source, sample_id - source_offset(source))


def sources_of(sample_ids: np.ndarray) -> np.ndarray:
    """Return the source of each id."""
    return sample_ids >> (INDEX_BITS + WINDOW_BITS)


def split_stream_index(within: int) -> tuple[int, int]:
    """Return the window of a sample of a stream, and the index in that window.

    >>> split_stream_index(window_offset(2) + 7)
    (2, 7)
    """
    return within >> INDEX_BITS, within & ((1 << INDEX_BITS) - 1)


class Samples(ABC):
    """Encoded samples by id; cheap to pickle, since a loader process reopens the files."""

    @abstractmethod
    def __getitem__(self, sample_id: int) -> Features:
        """Return the sample with that id."""

    @abstractmethod
    def location(self, sample_id: int) -> str:
        """Return the location of its row for messages, such as `train.jsonl, row 17`."""

    @abstractmethod
    def lengths_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each sample."""

    @abstractmethod
    def checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the checksum (uint64) of each sample's own arrays, computed when it was encoded."""

    def precomputed_checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the checksum (uint64) of each sample's precomputed arrays; 0 without such arrays."""
        return np.zeros(len(sample_ids), np.uint64)

    @abstractmethod
    def refuse(self, damaged: np.ndarray) -> tuple[str, ...]:
        """Return messages about samples that the loader delivered damaged.

        Sets that are also damaged on disk have been quarantined when this returns.
        """


@dataclass(frozen=True)
class DatasetView:
    """The samples of one or several sources, and their order."""

    samples: Samples
    order: Order
    fingerprint: str  # changes with the samples and with their positions
    epoch_tokens: int | None = None  # tokens of every epoch; None if epochs differ or the number is unknown
    lines: Callable[[int], tuple[str, ...]] = lambda num_positions: ()  # describes the first N positions to the user


def fingerprint_of(*parts: object) -> str:
    """Return a digest of values that can be written as JSON."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
