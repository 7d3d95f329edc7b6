"""The values of a label: names of classes, 0 or 1 for each class, or numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from finetune.data.formats.columns import NO_LABELS
from finetune.data.rows import describe, parse_row_json, shortened
from finetune.errors import DataError

_LARGEST = 1e38
"""The largest number of a label: labels become float32."""


def read_label_list(label: Any) -> list[Any] | Mapping[str, Any] | None:
    """Return the class names in a multi-label, or 0 or 1 by class name; None if it is null or has none.

    A string is parsed as JSON.
    """
    value = label
    if isinstance(label, str):
        try:
            value = parse_row_json(label)
        except (ValueError, DataError):
            value = label
    if isinstance(value, Mapping):
        return None if value and all(bit is None or str(bit) in NO_LABELS for bit in value.values()) else value
    if value is not None and not isinstance(value, list):
        separator = next((mark for mark in _SEPARATORS if isinstance(label, str) and mark in label), ",")
        raise DataError(
            f"the label must be a list of classes ([] for none), but is {describe(label)}. Write "
            '["a", "b"], or `task.classification.kind: single_label`. Texts such as '
            f"`a{separator}b` become lists by `template: {{label: \"{{{{ (label.split('{separator}') if label else [])"
            ' | tojson }}"}`, where `label` is the name of your column.'
        )
    return value


_SEPARATORS = ("|", ";", ",", " ")


def are_bits(values: Iterable[Any]) -> bool:
    """Return whether all values are 0 or 1, as numbers, booleans or text."""
    return all(str(value).lower() in _BITS for value in values)


_BITS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}


def present_classes(value: Iterable[Any] | Mapping[str, Any]) -> list[Any]:
    """Return the classes in a list, or those with 1 in an object; raises DataError for another value in it."""
    if not isinstance(value, Mapping):
        return list(value)
    for name, bit in value.items():
        if str(bit).lower() not in _BITS:
            raise DataError(f"the label of class `{name}` must be 0 or 1, but is {describe(bit)}.")
    return [name for name, bit in value.items() if _BITS[str(bit).lower()]]


def read_label_numbers(label: Any) -> Sequence[float]:
    """Return the numbers of a label: a number, a list of numbers, or a string that holds one, as in a CSV file."""
    values = list(label.values()) if isinstance(label, dict) else label if isinstance(label, list) else [label]
    numbers = [_number(value) for value in values]
    if not numbers:
        raise DataError("the label is an empty list. Write a number.")
    return numbers


def _number(value: Any) -> float:
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _LARGEST:
        limit = f" of at most {_LARGEST:g}" if type(value) is int or math.isfinite(number) else ""
        actual = f"`{shortened(value)}`" if isinstance(value, str) else describe(value)
        kind = "finite number" if isinstance(value, float) and not math.isfinite(value) else "number"
        raise DataError(f"the label must be a {kind}{limit}, but is {actual}. Fix it, or write another `kind`.")
    return number
