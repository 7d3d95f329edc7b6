"""DatasetView: samples by id, and the order in which they are read. A mix of views is a view.

An id encodes the source, the window of a stream, and the index of the sample in one integer. For a job with a single
source that is not a stream, the ids are the indices of its prepared set.
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


class Samples(Protocol):
    """Encoded samples by id; cheap to pickle, since a loader process reopens the files."""

    def __getitem__(self, sample_id: int) -> Features:
        """Return the sample with that id."""

    def location(self, sample_id: int) -> str:
        """Return the location of its row for messages, such as `train.jsonl, row 17`."""

    def lengths_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each sample."""

    def checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the checksum (uint64) of each sample's own arrays, computed when it was encoded."""

    def precomputed_checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the checksum (uint64) of each sample's precomputed arrays; 0 without such arrays."""

    def problem(self) -> str | None:
        """Return the damage found so far."""

    def refuse(self, damaged: np.ndarray) -> tuple[str, ...]:
        """Return messages about samples that the loader delivered damaged, or about a `problem`.

        Sets that are also damaged on disk have been quarantined when this returns.
        """


def no_lines(num_positions: int) -> tuple[str, ...]:
    """Return no lines."""
    return ()


@dataclass(frozen=True)
class DatasetView:
    """The samples of one or several sources, and their order."""

    samples: Samples
    order: Order
    fingerprint: str  # changes with the samples and with their positions
    epoch_tokens: int | None = None  # tokens of every epoch; None if epochs differ or the number is unknown
    lines: Callable[[int], tuple[str, ...]] = no_lines  # describes the first N positions to the user


def fingerprint_of(*parts: object) -> str:
    """Return a digest of values that can be written as JSON."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
