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
    has_control_names: bool = False  # the row's texts contain names of control tokens, encoded as plain text
    has_turn_marks: bool = False  # the row's texts contain the chat template's plain-text turn marks
    has_arguments: bool = False  # the row has chat template arguments
    has_overrides: bool = False  # which override some of the job's
    has_dropped_reasoning: bool = False  # the chat template drops the reasoning of a target turn
    has_same_prompt: bool = False  # the mismatched answers are of the same prompt

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
