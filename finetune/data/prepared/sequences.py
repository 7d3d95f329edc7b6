"""How long the sequences of a sample may be that consists of several, such as a prompt with either of two answers."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from finetune.data.features import LENGTHS_OF_SEQUENCES, Features
from finetune.data.prepared.counts import Counts
from finetune.data.prepared.lengths import OverLength, Side, cut_off, left_out


@dataclass(frozen=True)
class SequencesPolicy:
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
        """Tell whether each sequence is short enough."""
        return features.longest <= self.max_length

    def shorten(self, features: Features) -> tuple[tuple[Features, ...], Counts]:
        """Return what becomes of a sample that is too long, and how much of it is lost."""
        if self.over_length != "truncate":
            return (), left_out(features)
        keep = np.zeros(features.length, dtype=bool)
        too_long = features.longest - self.max_length if self.truncate_side == "start" else 0
        firsts = []
        for start, end in spans(features):
            first = min(start + too_long, end)
            keep[first : min(end, first + self.max_length)] = True
            firsts.append(first)
        shorter = _of_kept(features, keep, firsts=firsts if too_long else [])
        return (shorter,), cut_off(features, shorter)


def spans(features: Features) -> Iterator[tuple[int, int]]:
    """Yield where each sequence of the sample begins and ends among its tokens."""
    end = 0
    for length in features.arrays[LENGTHS_OF_SEQUENCES].tolist():
        yield end, end + length
        end += length


def _of_kept(features: Features, keep: np.ndarray, *, firsts: list[int]) -> Features:
    """Return the sample of the tokens that are kept; the first of a sequence that was cut there is no target.

    Where a sequence is left without a target, none of the sample is one.
    """
    is_target = features.arrays["is_target"] & keep
    is_target[[first for first in firsts if first < len(is_target)]] = False
    is_target &= all(is_target[start:end].any() for start, end in spans(features))
    lengths = np.array([keep[start:end].sum() for start, end in spans(features)], np.int32)
    arrays = {
        **features.arrays,
        "input_ids": features.arrays["input_ids"][keep],
        "is_target": is_target[keep],
        LENGTHS_OF_SEQUENCES: lengths,
    }
    return Features(arrays, features.sample_id)
