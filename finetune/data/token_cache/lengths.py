"""What happens to samples longer than `max_length`: refused, dropped, truncated or split, and what is lost by it.

Samples of several sequences, such as a prompt with either of two answers, are limited sequence by sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Literal, Protocol

import numpy as np

from finetune.data.features import LENGTHS_OF_SEQUENCES, Features
from finetune.data.token_cache.counts import Counts

OverLength = Literal["refuse", "drop", "truncate", "split"]
Side = Literal["end", "start"]


class LengthLimit(Protocol):
    """How long a sample may be, and what becomes of a longer one. Sent to other processes."""

    @property
    def limits(self) -> str:
        """Return the limits with their keys, for messages."""

    def advice(self, longest: int) -> str:
        """Return which key to raise, so that a sample of this number of tokens is short enough."""

    def fits(self, features: Features) -> bool:
        """Return whether the sample is short enough."""

    def shorten(self, features: Features) -> tuple[tuple[Features, ...], Counts]:
        """Return what becomes of a sample that is too long, and how much of it is lost."""


@dataclass(frozen=True)
class SampleLengthLimit:
    """The longest sample in tokens, and what happens to longer ones.

    `frame` counts the tokens at the beginning and at the end that every part of a sample keeps, such as BERT's
    `[CLS]` and `[SEP]`.
    """

    max_length: int
    over_length: OverLength
    truncate_side: Side = "end"
    frame: tuple[int, int] = (0, 0)

    @property
    def limits(self) -> str:
        """Return the longest sample."""
        return f"data.max_length: {self.max_length}"

    def advice(self, longest: int) -> str:
        """Return the length at which no row is too long."""
        return f"data.max_length: {longest}"

    def fits(self, features: Features) -> bool:
        """Return whether the sample is short enough."""
        return features.length <= self.max_length

    def shorten(self, features: Features) -> tuple[tuple[Features, ...], Counts]:
        """Return what becomes of a sample that is too long, and how much of it is lost."""
        if self.over_length == "truncate":
            shorter = truncated(features, self.max_length, side=self.truncate_side, frame=self.frame)
            return (shorter,), truncation_counts(features, shorter)
        if self.over_length == "split":
            windows = tuple(split(features, self.max_length, frame=self.frame))
            return self._with_targets(windows, features) if features.num_targets else ((), Counts())
        return (), dropped_counts(features)

    def _with_targets(self, windows: Sequence[Features], features: Features) -> tuple[tuple[Features, ...], Counts]:
        """Return the windows that have a target; tokens that are in none of these are dropped."""
        has_target = [window.num_targets > 0 for window in windows]
        kept = tuple(compress(windows, has_target))
        frame = sum(self.frame)
        num_shared = 0 if frame else sum(one and other for one, other in pairwise(has_target))
        num_covered = sum(window.length - frame for window in kept) - num_shared + frame
        return kept, Counts(split_rows=1, dropped_tokens=features.length - num_covered)


@dataclass(frozen=True)
class SourceTargetLengthLimit:
    """The longest source and the longest target of samples that are a source and, all of it trained on, its target.

    Where such a sample is cut, both of them are; `frame` is what a source keeps at its ends. None is split.
    """

    max_source: int
    max_target: int
    over_length: OverLength
    truncate_side: Side = "end"
    frame: tuple[int, int] = (0, 0)

    @property
    def limits(self) -> str:
        """Return the longest source and the longest target."""
        return f"data.max_length: {self.max_source} (source), task.seq2seq.max_target_length: {self.max_target}"

    def advice(self, longest: int) -> str:
        """Return both keys: one length does not tell which of them to raise."""
        return "raise these"

    def fits(self, features: Features) -> bool:
        """Return whether source and target are short enough."""
        num_targets = features.num_targets
        return num_targets <= self.max_target and features.length - num_targets <= self.max_source

    def shorten(self, features: Features) -> tuple[tuple[Features, ...], Counts]:
        """Return what becomes of a sample that is too long, and how much of it is lost."""
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
    """Return the sample with that side of every position-wise array cut off, its frame kept.

    Where the start is cut off, the first token left is no target: nothing stands before it to predict it from.
    """
    (before, after), length = frame, features.length
    if side == "end":
        return _joined(features, [(0, max_length - after), (length - after, length)])
    return _joined(features, [(0, before), (length - max_length + before, length)])


def split(features: Features, max_length: int, *, frame: tuple[int, int] = (0, 0)) -> Iterator[Features]:
    """Yield consecutive windows, each with the frame.

    Without one they overlap by one token, so that every target has a token before it in one window.
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
    """Return what a sample has lost that was made shorter."""
    return Counts(
        truncated_rows=1,
        truncated_tokens=features.length - shorter.length,
        truncated_targets=features.num_targets - shorter.num_targets,
    )


def dropped_counts(features: Features) -> Counts:
    """Return what is lost where a sample is not kept at all."""
    return Counts(long_rows=1, dropped_tokens=features.length, dropped_targets=features.num_targets)


def _joined(features: Features, places: Sequence[tuple[int, int]]) -> Features:
    """Return the sample with these ranges of its positions; arrays that are not position-wise stay whole."""
    length = features.length
    arrays = {
        name: np.concatenate([array[start:stop] for start, stop in places]) if len(array) == length else array
        for name, array in features.arrays.items()
    }
    first = next(start for start, stop in places if start < stop)
    if first > 0 and "is_target" in arrays:
        arrays["is_target"][:1] = False  # counted in the window before
    return Features(arrays, features.sample_id)


@dataclass(frozen=True)
class SequencesLengthLimit:
    """`max_length` holds for each sequence; where one is cut, the others are cut so that their prompts stay alike.

    At the end, each is cut to `max_length`. At the start, all lose what the longest has too much. A sample of which a
    sequence keeps no target is left out, as one without target. None is split.
    """

    max_length: int
    over_length: OverLength
    truncate_side: Side = "end"

    @property
    def limits(self) -> str:
        """Return the longest sequence."""
        return f"data.max_length: {self.max_length} (prompt and one answer)"

    def advice(self, longest: int) -> str:
        """Return the length at which no row is too long."""
        return f"data.max_length: {longest}"

    def fits(self, features: Features) -> bool:
        """Return whether each sequence is short enough."""
        return features.longest <= self.max_length

    def shorten(self, features: Features) -> tuple[tuple[Features, ...], Counts]:
        """Return what becomes of a sample that is too long, and how much of it is lost."""
        if self.over_length != "truncate":
            return (), dropped_counts(features)
        keep = np.zeros(features.length, dtype=bool)
        too_long = features.longest - self.max_length if self.truncate_side == "start" else 0
        firsts = []
        for start, end in sequence_bounds(features):
            first = min(start + too_long, end)
            keep[first : min(end, first + self.max_length)] = True
            firsts.append(first)
        shorter = _of_kept(features, keep, firsts=firsts if too_long else [])
        lost = _answer_counts(features, keep, firsts=firsts if too_long else [])
        return (shorter,), truncation_counts(features, shorter).plus(lost)


def sequence_bounds(features: Features) -> Iterator[tuple[int, int]]:
    """Yield where each sequence of the sample begins and ends among its tokens."""
    end = 0
    for length in features.arrays[LENGTHS_OF_SEQUENCES].tolist():
        yield end, end + length
        end += length


def _answer_counts(features: Features, keep: np.ndarray, *, firsts: list[int]) -> Counts:
    """Return whether an answer of the sample lost a part of its targets, or all of them."""
    before, after = features.arrays["is_target"], _kept_targets(features, keep, firsts=firsts)
    answers = [(before[start:end].sum(), after[start:end].sum()) for start, end in sequence_bounds(features)]
    is_lost = any(num and not left for num, left in answers)
    is_cut = any(left < num for num, left in answers)
    return Counts(cut_answer_rows=int(is_cut and not is_lost), lost_answer_rows=int(is_lost))


def _kept_targets(features: Features, keep: np.ndarray, *, firsts: list[int]) -> np.ndarray:
    """Return which of the sample's tokens are targets still; the first of a sequence that was cut there is none."""
    is_target: np.ndarray = features.arrays["is_target"] & keep
    is_target[[first for first in firsts if first < len(is_target)]] = False
    return is_target


def _of_kept(features: Features, keep: np.ndarray, *, firsts: list[int]) -> Features:
    """Return the sample of the tokens that are kept.

    Where a sequence is left without a target, none of the sample is one.
    """
    is_target = _kept_targets(features, keep, firsts=firsts)
    is_target &= all(is_target[start:end].any() for start, end in sequence_bounds(features))
    lengths = np.array([keep[start:end].sum() for start, end in sequence_bounds(features)], np.int32)
    arrays = {
        **features.arrays,
        "input_ids": features.arrays["input_ids"][keep],
        "is_target": is_target[keep],
        LENGTHS_OF_SEQUENCES: lengths,
    }
    return Features(arrays, features.sample_id)
