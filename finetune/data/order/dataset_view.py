"""DatasetView: samples by id, and the order in which they are taken. A mix of views is a view.

An id says in one whole number which source, which window of a stream, and which sample in it. A job with one source
that is no stream has the ids 0, 1, 2, ..., the indices of its prepared set.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from finetune.data.features import Features
from finetune.data.order.order import Order

INDEX_BITS, WINDOW_BITS = 24, 24
"""A window of a stream has up to 16 million samples, a stream up to 16 million windows."""


class SourceSampleId(NamedTuple):
    """Where a sample stands: in a prepared set, which is no stream, the window is 0 and the index may be any."""

    source: int
    within: int  # the id that the sample has in its source alone


def source_offset(source: int) -> int:
    """Return what is added to the ids that the samples of this source have in it alone."""
    return source << (INDEX_BITS + WINDOW_BITS)


def window_offset(window: int) -> int:
    """Return what is added to the index that a sample has in this window of its stream."""
    return window << INDEX_BITS


def split_sample_id(sample_id: int) -> SourceSampleId:
    """Return the source of the id and the id within it.

    >>> split_sample_id(source_offset(2) + 7)
    SourceSampleId(source=2, within=7)
    """
    source = sample_id >> (INDEX_BITS + WINDOW_BITS)
    return SourceSampleId(source, sample_id - source_offset(source))


def sources_of(sample_ids: np.ndarray) -> np.ndarray:
    """Return the source of each id."""
    return sample_ids >> (INDEX_BITS + WINDOW_BITS)


def split_stream_index(within: int) -> tuple[int, int]:
    """Return the window of a stream's sample, and its index in that window.

    >>> split_stream_index(window_offset(2) + 7)
    (2, 7)
    """
    return within >> INDEX_BITS, within & ((1 << INDEX_BITS) - 1)


class Samples(Protocol):
    """Encoded samples by id; small to send to a loader process, since it opens its files again."""

    def __getitem__(self, sample_id: int) -> Features:
        """Return the sample of that id."""

    def place(self, sample_id: int) -> str:
        """Return where its row stands, for a message: `train.jsonl, row 17`."""

    def lengths_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the tokens of each sample."""

    def checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the mark (uint64) of each sample's own arrays, as it was when it was made."""

    def precomputed_checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the mark (uint64) of what is delivered with each sample next to its own arrays; 0 of nothing."""

    def problem(self) -> str | None:
        """Return what has been found to be damaged so far."""

    def refuse(self, damaged: np.ndarray) -> tuple[str, ...]:
        """Return messages on samples that were delivered damaged, or on a `problem`.

        What is damaged on disk, too, is set aside by then.
        """


def no_lines(num_positions: int) -> tuple[str, ...]:
    """Return no line."""
    return ()


@dataclass(frozen=True)
class DatasetView:
    """The samples of one source or of several, and their order."""

    samples: Samples
    order: Order
    fingerprint: str  # of all that decides what the samples are and at which positions they stand
    epoch_tokens: int | None = None  # of every epoch; None where they differ, or where nobody knows
    lines: Callable[[int], tuple[str, ...]] = no_lines  # about the first positions, up to a number, for the user


def fingerprint_of(*parts: object) -> str:
    """Return a digest of what JSON can hold."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
