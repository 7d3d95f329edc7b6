"""Features: one encoded sample before padding and batching, or the DataError of its row."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from finetune.errors import DataError

LENGTHS_OF_SEQUENCES = "sequence_lengths"
"""The array with the lengths of a sample's sequences, which are concatenated in the other arrays."""


@dataclass(frozen=True)
class Findings:
    """Observations about a row during encoding, which `Counts` counts."""

    flags: frozenset[str] = frozenset()  # fields of Counts that count the rows with them
    empty_answers: int = 0  # target turns with nothing but the end of the turn as a target
    unread_keys: frozenset[str] = frozenset()  # of its turns: neither this package nor the chat template reads them

    def plus(self, other: "Findings") -> "Findings":
        """Return what was noticed about both."""
        empty_answers = self.empty_answers + other.empty_answers
        return Findings(self.flags | other.flags, empty_answers, self.unread_keys | other.unread_keys)


NOTHING_FOUND = Findings()
CONTROL_NAMES = Findings(frozenset({"control_rows"}))  # in the row's texts, encoded as plain text


@dataclass(frozen=True)
class Features:
    """One encoded sample: named 1-D arrays of any length, and its id in the prepared set.

    A language-model sample has `input_ids` (uint32) and `is_target` (bool) of equal length: `is_target[t]` means that
    token t counts in the loss, predicted from the tokens before it.
    """

    arrays: Mapping[str, np.ndarray]
    sample_id: int = -1  # -1: not in a prepared set yet
    seed: int = 0  # of the step in which it is used; 0 without randomness
    partner: "Features | None" = None  # another sample to mix it with, if the task mixes samples
    cut_tokens: int = 0  # that the encoder removed to fit the maximum length
    cut_targets: int = 0  # of cut_tokens
    findings: Findings = NOTHING_FOUND

    @property
    def length(self) -> int:
        """Return the number of tokens (positions) of the sample."""
        return len(next(iter(self.arrays.values())))

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest sequence; most samples have only one."""
        lengths = self.arrays.get(LENGTHS_OF_SEQUENCES)
        return self.length if lengths is None else int(lengths.max())

    @property
    def num_targets(self) -> int:
        """Return the number of positions that count in the loss; a sample without `is_target` is a single target."""
        is_target = self.arrays.get("is_target")
        return 1 if is_target is None else int(np.count_nonzero(is_target))


class Unlabeled(Enum):
    """The outcome of a row without a label, which is left out."""

    UNLABELED = "unlabeled"


UNLABELED = Unlabeled.UNLABELED

Outcome = Features | tuple[Features, ...] | DataError | Unlabeled | None
"""The result of encoding a row: features, or several if each answer is a sample; an error; None without a target."""


Result = TypeVar("Result")


def result_or_error(function: Callable[..., Result], *arguments: Any) -> Result | DataError:
    """Return the function's result, or the DataError that it raised."""
    try:
        return function(*arguments)
    except DataError as error:
        return error
