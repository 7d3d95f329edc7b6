"""Length limits: longer samples are refused, dropped, truncated or split, and the lost tokens are counted.

In samples of several sequences, such as a prompt with each of two answers, the limit applies to each sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import ClassVar, Literal

import numpy as np

from finetune.data.features import LENGTHS_OF_SEQUENCES, Features
from finetune.data.token_cache.counts import Counts

OverLength = Literal["refuse", "drop", "truncate", "split"]
Side = Literal["end", "start"]


@dataclass(frozen=True)
class SampleLengthLimit:
    """The maximum number of tokens of a sample, and the policy for longer ones. Sent to other processes.

    `frame` is the number of tokens at the start and at the end that every part of a sample keeps, such as BERT's
    `[CLS]` and `[SEP]`.
    """

    max_length: int
    over_length: OverLength
    truncate_side: Side = "end"
    frame: tuple[int, int] = (0, 0)
    advice: ClassVar[str] = "data.max_length: {longest}"  # the setting with which the longest sample fits

    @property
    def limits(self) -> str:
        """Return the maximum length with its key, for messages."""
        return f"data.max_length: {self.max_length}"

    def fits(self, features: Features) -> bool:
        """Return whether the sample is within the limit."""
        return features.length <= self.max_length

    def shorten(self, features: Features) -> tuple[tuple[Features, ...], Counts]:
        """Return the samples that replace a sample beyond the limit, and counts of the losses."""
        if self.over_length == "truncate":
            shorter = truncated(features, self.max_length, side=self.truncate_side, frame=self.frame)
            return (shorter,), truncation_counts(features, shorter)
        if self.over_length == "split":
            if not features.num_targets:
                return (), Counts()
            # windows without a target are dropped, and so are the tokens that are in no other window
            windows = tuple(split(features, self.max_length, frame=self.frame))
            has_target = [window.num_targets > 0 for window in windows]
            kept = tuple(compress(windows, has_target))
            frame = sum(self.frame)
            num_shared = 0 if frame else sum(first and second for first, second in pairwise(has_target))
            num_covered = sum(window.length - frame for window in kept) - num_shared + frame
            return kept, Counts(split_rows=1, dropped_tokens=features.length - num_covered)
        return (), dropped_counts(features)


@dataclass(frozen=True)
class SourceTargetLengthLimit:
    """The maximum lengths of the source and of the target of sequence-to-sequence samples.

    Source and target are truncated separately; `frame` is kept at the ends of the source. Samples are never split.
    """

    max_source: int
    max_target: int
    over_length: OverLength
    truncate_side: Side = "end"
    frame: tuple[int, int] = (0, 0)
    advice: ClassVar[str] = "raise these"  # the total length does not determine which one to raise

    @property
    def limits(self) -> str:
        """Return both limits with their keys, for messages."""
        return f"data.max_length: {self.max_source} (source), task.seq2seq.max_target_length: {self.max_target}"

    def fits(self, features: Features) -> bool:
        """Return whether source and target are within their limits."""
        num_targets = features.num_targets
        return num_targets <= self.max_target and features.length - num_targets <= self.max_source

    def shorten(self, features: Features) -> tuple[tuple[Features, ...], Counts]:
        """Return the samples that replace a sample beyond the limit, and counts of the losses."""
        if self.over_length != "truncate":
            return (), dropped_counts(features)
        end = features.length - features.num_targets
        source = _joined(features, [(0, end)])
        if source.length > self.max_source:
            source = truncated(source, self.max_source, side=self.truncate_side, frame=self.frame)
        arrays = {
            name: np.concatenate([source.arrays[name], values[end : end + self.max_target]])
            for name, values in features.arrays.items()
        }
        shorter = Features(arrays, features.sample_id)
        return (shorter,), truncation_counts(features, shorter)


def truncated(features: Features, max_length: int, *, side: Side = "end", frame: tuple[int, int] = (0, 0)) -> Features:
    """Return the sample with that side of every position-wise array cut off, keeping the frame.

    If the start is cut off, the first remaining token is not a target: there is no token to predict it from.
    """
    (before, after), length = frame, features.length
    if side == "end":
        return _joined(features, [(0, max_length - after), (length - after, length)])
    return _joined(features, [(0, before), (length - max_length + before, length)])


def split(features: Features, max_length: int, *, frame: tuple[int, int] = (0, 0)) -> Iterator[Features]:
    """Yield consecutive windows, each with the frame.

    Without a frame, windows overlap by one token, so that every target has a preceding token in some window.
    """
    before, after = frame
    end, room = features.length - after, max_length - before - after
    if frame == (0, 0):
        for start in range(0, features.length - 1, max_length - 1):
            yield _joined(features, [(start, min(start + max_length, features.length))])
    else:
        for start in range(before, end, room):
            yield _joined(features, [(0, before), (start, min(start + room, end)), (end, features.length)])


def truncation_counts(features: Features, shorter: Features) -> Counts:
    """Return the tokens and targets lost by truncating a sample."""
    return Counts(
        truncated_rows=1,
        truncated_tokens=features.length - shorter.length,
        truncated_targets=features.num_targets - shorter.num_targets,
    )


def dropped_counts(features: Features) -> Counts:
    """Return the tokens and targets lost by dropping a sample."""
    return Counts(long_rows=1, dropped_tokens=features.length, dropped_targets=features.num_targets)


def _joined(features: Features, ranges: Sequence[tuple[int, int]]) -> Features:
    """Return the sample with only these ranges of positions; arrays that are not position-wise are kept whole."""
    length = features.length
    arrays = {
        name: np.concatenate([array[start:stop] for start, stop in ranges]) if len(array) == length else array
        for name, array in features.arrays.items()
    }
    first = next(start for start, stop in ranges if start < stop)
    if first > 0 and "is_target" in arrays:
        arrays["is_target"][:1] = False  # counted in the previous window
    return Features(arrays, features.sample_id)


@dataclass(frozen=True)
class SequencesLengthLimit:
    """`max_length` applies to each sequence; if one is cut, the others are cut so that their prompts stay equal.

    At the end, each is cut to `max_length`. At the start, all lose the excess of the longest. A sample with a sequence
    that keeps no target is dropped as one without target. Samples are never split.
    """

    max_length: int
    over_length: OverLength
    truncate_side: Side = "end"
    advice: ClassVar[str] = "data.max_length: {longest}"  # the setting with which the longest sample fits

    @property
    def limits(self) -> str:
        """Return the maximum length with its key, for messages."""
        return f"data.max_length: {self.max_length} (prompt and one answer)"

    def fits(self, features: Features) -> bool:
        """Return whether every sequence is within the limit."""
        return features.longest <= self.max_length

    def shorten(self, features: Features) -> tuple[tuple[Features, ...], Counts]:
        """Return the samples that replace a sample beyond the limit, and counts of the losses."""
        if self.over_length != "truncate":
            return (), dropped_counts(features)
        bounds = list(sequence_bounds(features))
        excess = features.longest - self.max_length if self.truncate_side == "start" else 0
        keep = np.zeros(features.length, dtype=bool)
        firsts = [min(start + excess, end) for start, end in bounds]
        for first, (_, end) in zip(firsts, bounds, strict=True):
            keep[first : min(end, first + self.max_length)] = True
        before = features.arrays["is_target"]
        after: np.ndarray = before & keep
        if excess:  # the first token of a sequence cut at the start is not a target
            after[[first for first in firsts if first < len(after)]] = False
        if not all(after[start:end].any() for start, end in bounds):
            after[:] = False
        arrays = {
            **features.arrays,
            "input_ids": features.arrays["input_ids"][keep],
            "is_target": after[keep],
            LENGTHS_OF_SEQUENCES: np.array([keep[start:end].sum() for start, end in bounds], np.int32),
        }
        shorter = Features(arrays, features.sample_id)
        return (shorter,), truncation_counts(features, shorter)


def sequence_bounds(features: Features) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each sequence of the sample."""
    end = 0
    for length in features.arrays[LENGTHS_OF_SEQUENCES].tolist():
        yield end, end + length
        end += length


LengthLimit = SampleLengthLimit | SourceTargetLengthLimit | SequencesLengthLimit
