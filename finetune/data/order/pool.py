"""What is learnt from: samples and the order in which they are taken. A mix of pools is a pool."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from finetune.data.features import Features
from finetune.data.order.order import Order


class Samples(Protocol):
    """Encoded samples by id; small to send to a loader process, since it opens its files anew."""

    def __getitem__(self, sample_id: int) -> Features:
        """Return the sample of that id."""

    def place(self, sample_id: int) -> str:
        """Return where its row stands, for a message: `train.jsonl, row 17`."""

    def lengths_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the tokens of each sample."""

    def marks_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the mark (uint64) of each sample's own arrays, as it was when it was made."""

    def known_marks_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the mark (uint64) of what is delivered with each sample beside its own arrays; 0 of nothing."""

    def problem(self) -> str | None:
        """Return what has been found to be damaged by now."""

    def refuse(self, damaged: np.ndarray) -> tuple[str, ...]:
        """Return what is to be said of samples that were delivered damaged, or of a `problem`.

        What is damaged on disk, too, is set aside by then.
        """


def nothing_to_tell(num_positions: int) -> tuple[str, ...]:
    """Return no line."""
    return ()


@dataclass(frozen=True)
class Pool:
    """The samples of one source or of several, and their order."""

    samples: Samples
    order: Order
    fingerprint: str  # of all that decides what the samples are and at which positions they stand
    epoch_tokens: int | None = None  # of every epoch; None where they differ, or where nobody knows
    lines: Callable[[int], tuple[str, ...]] = nothing_to_tell  # about the first so many positions, for the user


def fingerprint_of(*parts: object) -> str:
    """Return a digest of what JSON can hold."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
