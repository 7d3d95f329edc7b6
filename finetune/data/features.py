"""Features: one sample as numbers, before it is padded and stacked, or the DataError of its row."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from finetune.errors import DataError

LENGTHS_OF_SEQUENCES = "sequence_lengths"
"""The array of a sample of several sequences, which stand end to end in the others: how long each is."""


@dataclass(frozen=True)
class Features:
    """One encoded sample: named 1-D arrays of any length, and the index of its row in the prepared set.

    A language-model sample holds `input_ids` (uint32) and `is_target` (bool), of one length: `is_target[t]` says that
    token t counts in the loss, predicted from the tokens before it.
    """

    arrays: Mapping[str, np.ndarray]
    sample_id: int = -1  # -1: not in a prepared set yet
    seed: int = 0  # of the step that it is used in; 0 where nothing is to be random
    partner: "Features | None" = None  # another sample to be mixed with it, where the task has partners
    cut_tokens: int = 0  # that the encoder has left out so that the sample is short enough and still whole
    cut_targets: int = 0  # of those
    has_control_names: bool = False  # the row's texts hold names of control tokens, which are encoded as plain text
    has_turn_marks: bool = False  # or what the chat template writes around turns in plain text
    has_arguments: bool = False  # the row has arguments of the chat template
    has_overrides: bool = False  # some of them are in place of the job's
    has_dropped_reasoning: bool = False  # the chat template leaves out the reasoning of a target turn

    @property
    def length(self) -> int:
        """Return the number of tokens (positions) of the sample."""
        return len(next(iter(self.arrays.values())))

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest sequence; most samples are one."""
        lengths = self.arrays.get(LENGTHS_OF_SEQUENCES)
        return self.length if lengths is None else int(lengths.max())

    @property
    def num_targets(self) -> int:
        """Return the number of positions that count in the loss; a sample without `is_target` is one target itself."""
        is_target = self.arrays.get("is_target")
        return 1 if is_target is None else int(np.count_nonzero(is_target))


Outcome = Features | tuple[Features, ...] | DataError | None
"""What becomes of a row: features, or those of several samples where each answer is one; the reason why it cannot be
encoded; None where it has no target."""


Made = TypeVar("Made")


def result_or_error(make: Callable[..., Made], *arguments: Any) -> Made | DataError:
    """Return what is made, or the DataError that says why it is not."""
    try:
        return make(*arguments)
    except DataError as error:
        return error
