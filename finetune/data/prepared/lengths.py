"""What happens to samples longer than `max_length`: refused, left out, cut or split, and what is lost by it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Literal

import numpy as np

from finetune.data.features import Features
from finetune.data.prepared.counts import Counts


@dataclass(frozen=True)
class LengthPolicy:
    """The longest sample in tokens, and what happens to longer ones."""

    max_length: int
    over_length: Literal["refuse", "drop", "truncate", "split"]
    truncate_side: Literal["end", "start"] = "end"

    def shorten(self, features: Features) -> tuple[tuple[Features, ...], Counts]:
        """Return what becomes of a sample that is too long, and how much of it is lost."""
        if self.over_length == "truncate":
            shorter = truncated(features, self.max_length, side=self.truncate_side)
            lost_tokens, lost_targets = features.length - shorter.length, features.num_targets - shorter.num_targets
            return (shorter,), Counts(truncated_rows=1, truncated_tokens=lost_tokens, truncated_targets=lost_targets)
        if self.over_length == "split":
            windows = tuple(split(features, self.max_length))
            return _with_targets(windows, num_tokens=features.length) if features.num_targets else ((), Counts())
        return (), Counts(long_rows=1, dropped_tokens=features.length, dropped_targets=features.num_targets)


def truncated(features: Features, max_length: int, *, side: Literal["end", "start"] = "end") -> Features:
    """Return the sample with that side of every position-wise array cut off.

    Where the start is cut off, the first token left is no target: nothing stands before it to predict it from.
    """
    start = features.length - max_length if side == "start" else 0
    return _part(features, start, start + max_length)


def split(features: Features, max_length: int) -> Iterator[Features]:
    """Yield consecutive windows that overlap by one token, so that every target has a token before it in one window."""
    for start in range(0, features.length - 1, max_length - 1):
        yield _part(features, start, min(start + max_length, features.length))


def _part(features: Features, start: int, stop: int) -> Features:
    length = features.length
    arrays = {name: array[start:stop] if len(array) == length else array for name, array in features.arrays.items()}
    if start > 0 and "is_target" in arrays:
        arrays["is_target"] = np.append(False, arrays["is_target"][1:])  # counted in the window before
    return Features(arrays, features.sample_id)


def _with_targets(windows: Sequence[Features], *, num_tokens: int) -> tuple[tuple[Features, ...], Counts]:
    """Return the windows that have a target; tokens that are in none of these are dropped."""
    has_target = [window.num_targets > 0 for window in windows]
    kept = tuple(compress(windows, has_target))
    num_shared = sum(one and other for one, other in pairwise(has_target))
    num_covered = sum(window.length for window in kept) - num_shared
    return kept, Counts(split_rows=1, dropped_tokens=num_tokens - num_covered)
