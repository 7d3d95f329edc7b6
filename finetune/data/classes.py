"""Classes: their names and the indices of the model's outputs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from finetune.data.formats.columns import quoted_list
from finetune.data.rows import describe, require_valid_unicode
from finetune.errors import DataError

_MAX_LISTED = 20


@dataclass(frozen=True)
class Classes:
    """The names of the classes in the order of the model's outputs."""

    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def index(self, label: Any) -> int:
        """Return the output index of a row's class; raises DataError naming it and the known ones."""
        name = label_name(label)
        index = self._indices.get(name)
        if index is None:
            more = len(self.names) - _MAX_LISTED
            listed = quoted_list(self.names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
            near = get_close_matches(name, self.names, n=1)
            hint = f"Did you mean `{near[0]}`? " if near else ""
            raise DataError(
                f"there is no class `{name}`; the classes are {listed}. {hint}Fix the label, or add the class to "
                "`task.classification.labels`."
            )
        return index

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}


def label_name(label: Any) -> str:
    """Return the class name of a label: the text itself, or an integer or boolean as in JSON.

    >>> label_name("spam"), label_name(3), label_name(3.0), label_name(True)
    ('spam', '3', '3', 'true')

    Raises DataError for anything else, including blank text.
    """
    if isinstance(label, str) and label.strip():
        return require_valid_unicode(label)
    if isinstance(label, bool):
        return "true" if label else "false"
    if isinstance(label, int) or (isinstance(label, float) and label.is_integer()):
        return str(int(label))
    if isinstance(label, str):
        raise DataError("the label is empty. Write a class.")
    raise DataError(f"a label must be text or an integer, but is {describe(label)}.")


_MAX_DIGITS = 1_000


def sort_names(names: Iterable[str]) -> list[str]:
    """Return the class names sorted: numerically if all of them are integers, else as text.

    >>> sort_names(["10", "9"]), sort_names(["b", "10", "9"])
    (['9', '10'], ['10', '9', 'b'])
    """
    unsorted = list(names)
    are_numbers = all(name.removeprefix("-").isdecimal() and len(name) < _MAX_DIGITS for name in unsorted)
    return sorted(unsorted, key=int if are_numbers else str)


def balanced_weights(counts: Sequence[int]) -> tuple[float, ...]:
    """Return a weight for each class, inversely proportional to its frequency; their mean over all samples is 1.

    A class that does not occur has weight 1.

    >>> balanced_weights([3, 1])
    (0.6666666666666666, 2.0)
    """
    num_present = sum(count > 0 for count in counts)
    return tuple(sum(counts) / (num_present * count) if count else 1.0 for count in counts)


def positive_weights(counts: Sequence[int], num_rows: int) -> tuple[float, ...]:
    """Return, for each class, the ratio of rows without it to rows with it, as torch recommends for `pos_weight`.

    A class that no row or every row has gets weight 1.

    >>> positive_weights([2, 5, 10, 0], 10)
    (4.0, 1.0, 1.0, 1.0)
    """
    return tuple((num_rows - count) / count if 0 < count < num_rows else 1.0 for count in counts)
