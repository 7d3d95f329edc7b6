"""What a row's label is as numbers: the index of a class, 0 or 1 for each class, or the numbers themselves."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from finetune.data.classes import Classes
from finetune.data.rows import describe, parsed_json, shown
from finetune.errors import DataError

_LARGEST = 1e38
"""Of numbers that are learnt: they become float32."""


class Labels(Protocol):
    """From a row's label to an array. Sent to other processes."""

    def __call__(self, label: Any) -> np.ndarray:
        """Return the label as numbers, 1-D; raises DataError for one that is not of this kind."""


@dataclass(frozen=True)
class OneClass:
    """A label is the name of exactly one class."""

    classes: Classes

    def __call__(self, label: Any) -> np.ndarray:
        """Return the index of the class, int64 [1]."""
        if isinstance(label, list):
            raise DataError(
                "the label is a list. Write one class, or `task.classification.kind: multi_label` (for numbers: "
                "`regression`)."
            )
        return np.array([self.classes.index(label)], np.int64)


@dataclass(frozen=True)
class SeveralClasses:
    """A label is a list of the names of classes, none or all of them."""

    classes: Classes

    def __call__(self, label: Any) -> np.ndarray:
        """Return for each class whether it applies, float32 [classes]."""
        applies = np.zeros(len(self.classes), np.float32)
        applies[[self.classes.index(each) for each in several(label)]] = 1.0
        return applies


@dataclass(frozen=True)
class Numbers:
    """A label is a number, or a list of so many."""

    num_numbers: int

    def __call__(self, label: Any) -> np.ndarray:
        """Return the numbers, float64 [numbers]."""
        values = numbers(label)
        if len(values) != self.num_numbers:
            raise DataError(
                f"the label has {len(values)} number{'s' * (len(values) != 1)}, and {self.num_numbers} "
                f"{'is' if self.num_numbers == 1 else 'are'} learnt, as in the first row or in "
                "`task.classification.labels`. Each row needs the same."
            )
        return np.array(values, np.float64)


def several(label: Any) -> Sequence[Any]:
    """Return the names in a label of several classes; a text is read as the JSON list that it must be."""
    value = label
    if isinstance(label, str):
        try:
            value = parsed_json(label)
        except (ValueError, DataError):
            value = label
    if not isinstance(value, list):
        raise DataError(
            f"the label must be a list of classes ([] where there are none), but is {describe(label)}. Write "
            '["a", "b"], or `task.classification.kind: single_label`.'
        )
    return value


def numbers(label: Any) -> Sequence[float]:
    """Return the numbers of a label that is a number, a list of them, or a text that is one, as in a CSV file."""
    found = [_number(each) for each in (label if isinstance(label, list) else [label])]
    if not found:
        raise DataError("the label is an empty list. Write a number.")
    return found


def labels_in(label: Any, *, is_multi: bool) -> Iterable[Any]:
    """Return the classes that a label names; raises DataError as the encoders do."""
    if is_multi:
        return several(label)
    if isinstance(label, list):
        OneClass(Classes(()))(label)  # tells what to write instead
    return [label]


def _number(value: Any) -> float:
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _LARGEST:
        limit = f" of at most {_LARGEST:g}" if type(value) is int or math.isfinite(number) else ""
        said = f"`{shown(value)}`" if isinstance(value, str) else describe(value)
        raise DataError(f"the label must be a number{limit}, but is {said}. Mend it, or write another `kind`.")
    return number
