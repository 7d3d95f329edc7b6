"""`--set train.learning_rate=1e-5..1e-3`: ranges and choices of a search."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.commands.sweep.axes import Axis, value_text
from finetune.commands.sweep.runs import Values
from finetune.config.yaml import read_yaml
from finetune.errors import ConfigError, Problem, UserError

_RANGE = re.compile(r"(?:(log|linear):)?([^.].*?)\.\.([^.].*)")
_LOG_RATIO = 100.0
"""A range over at least two decades is searched on a logarithmic scale."""


@dataclass(frozen=True)
class Range:
    """Numbers between two bounds, both included; whole ones where both bounds are."""

    low: float
    high: float
    is_log: bool

    @property
    def is_whole(self) -> bool:
        """Return whether it holds whole numbers only."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def __contains__(self, value: object) -> bool:
        """Return whether the value is in the range."""
        return isinstance(value, int | float) and self.low <= value <= self.high


@dataclass(frozen=True)
class Choices:
    """Values without an order."""

    values: tuple[Any, ...]

    def __contains__(self, value: object) -> bool:
        """Return whether the value is one of them."""
        return value_text(value) in map(value_text, self.values)


Space = Mapping[str, Range | Choices]


def parse_space(axes: Sequence[Axis]) -> dict[str, Range | Choices]:
    """Return the range or choices of each swept key; keys with one value are left out.

    Raises ConfigError for an invalid range, UserError where there is nothing to search.
    """
    space: dict[str, Range | Choices] = {}
    problems = []
    for axis in axes:
        try:
            domain = _parse(axis)
        except ValueError as error:
            problems.append(Problem(axis.key, str(error), source=axis.label))
            continue
        if domain is not None:
            space[axis.key] = domain
    if problems:
        raise ConfigError(problems, "the sweep")
    if not space:
        raise UserError("--search: nothing varies. Write a range, such as --set train.learning_rate=1e-5..1e-3.")
    return space


def require_no_ranges(axes: Sequence[Axis]) -> None:
    """Raise UserError for a range without --search."""
    for axis in axes:
        for value in axis.values:
            if isinstance(value, str) and (match := _RANGE.fullmatch(value)) and _bounds(match) is not None:
                raise UserError(f"{axis.label}: a range needs --search N. For a grid write the values, with commas.")


def bounds_of(space: Space) -> Iterator[Values]:
    """Yield the points at which a space is checked: both ends of each range, and every choice."""
    first = {key: domain.low if isinstance(domain, Range) else domain.values[0] for key, domain in space.items()}
    yield first
    for key, domain in space.items():
        others = [domain.high] if isinstance(domain, Range) else domain.values[1:]
        yield from ({**first, key: value} for value in others)


def is_inside(values: Values, space: Space) -> bool:
    """Return whether the values are in the space: it may have been a different one when they were chosen."""
    return values.keys() == space.keys() and all(values[key] in domain for key, domain in space.items())


def _parse(axis: Axis) -> Range | Choices | None:
    if axis.is_swept:
        return Choices(axis.values)
    value = axis.values[0]
    match = _RANGE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    bounds = _bounds(match)
    if bounds is None:
        return None  # a text with two dots
    low, high = bounds
    if not low < high:
        raise ValueError(f"the range ends at {high:g} and begins at {low:g}. Write the smaller number first.")
    if match[1] == "log" and low <= 0:
        raise ValueError(f"a logarithmic range cannot begin at {low:g}. Write a positive number.")
    is_log = match[1] == "log" or (match[1] is None and low > 0 and high / low >= _LOG_RATIO)
    return Range(low, high, is_log)


def _bounds(match: re.Match[str]) -> tuple[float, float] | None:
    """Return the two numbers, both of them int or float; None where they are not finite numbers."""
    low, high = (read_yaml(text).values for text in (match[2], match[3]))
    if any(isinstance(bound, bool) or not isinstance(bound, int | float) for bound in (low, high)):
        return None
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    return (low, high) if isinstance(low, int) and isinstance(high, int) else (float(low), float(high))
