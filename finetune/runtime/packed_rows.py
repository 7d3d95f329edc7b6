"""The interface of tasks and models for rows with several packed samples."""

from collections.abc import Sequence

SAMPLE_LENGTHS = "sample_lengths"
"""The argument of a model's forward with the lengths of the samples."""


class SampleLengths:
    """The number of tokens of each sample of the row, as integers on the host: no host-device synchronization.

    Not a tuple: a compiler would specialize on its length and recompile for every number of samples. If the model gets
    one of several equal slices of the row (`runtime/parallel/sequence.py`), the lengths are those of the whole row.
    """

    __slots__ = ("num_slices", "values")

    def __init__(self, values: Sequence[int], *, num_slices: int = 1) -> None:
        self.values = list(values)
        self.num_slices = num_slices
