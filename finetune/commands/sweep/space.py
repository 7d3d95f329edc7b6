"""The space of a sweep as Optuna's distributions: the choices of a grid; the ranges and choices of a search."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from finetune.commands.sweep.axes import Axis, Values, value_text
from finetune.config.yaml import read_yaml
from finetune.errors import ConfigError, Problem, UserError

Distribution = CategoricalDistribution | FloatDistribution | IntDistribution
Space = Mapping[str, Distribution]
"""The distribution of each swept key; the choices are the texts of values, without secrets."""

_RANGE = re.compile(r"(?:(log|linear):)?([^.].*?)\.\.([^.].*)")
_LOG_RATIO = 100.0
"""A range over at least two decades is searched on a logarithmic scale."""


def choices_of(axes: Sequence[Axis]) -> Space:
    """Return the choices of each key with several values; raises UserError for a range, which needs `--search`."""
    for axis in axes:
        if any(_read_range(value) is not None for value in axis.values):
            raise UserError(f"{axis.label}: a range needs --search N. For a grid write the values, with commas.")
    return {axis.key: _choices(axis) for axis in axes if axis.is_swept}


def parse_space(axes: Sequence[Axis]) -> Space:
    """Return the range or choices of each swept key; keys with one value are omitted.

    Raises ConfigError for an invalid range, UserError if nothing varies.
    """
    space: dict[str, Distribution] = {}
    problems = []
    for axis in axes:
        bounds = _read_range(axis.values[0])
        if axis.is_swept:
            space[axis.key] = _choices(axis)
        elif bounds is not None:
            low, high, scale = bounds
            if not low < high:
                message = f"the range ends at {high:g} and begins at {low:g}. Write the smaller number first."
                problems.append(Problem(axis.key, message, source=axis.label))
            elif scale == "log" and low <= 0:
                message = f"a logarithmic range cannot begin at {low:g}. Write a positive number."
                problems.append(Problem(axis.key, message, source=axis.label))
            else:
                is_log = scale == "log" or (scale is None and low > 0 and high / low >= _LOG_RATIO)
                if isinstance(low, int) and isinstance(high, int):
                    space[axis.key] = IntDistribution(low, high, log=is_log)
                else:
                    space[axis.key] = FloatDistribution(low, high, log=is_log)
    if problems:
        raise ConfigError(problems, "the sweep")
    if not space:
        raise UserError("--search: nothing varies. Write a range, such as --set train.learning_rate=1e-5..1e-3.")
    return space


def _choices(axis: Axis) -> CategoricalDistribution:
    return CategoricalDistribution([value_text(value) for value in axis.values])


def _read_range(value: Any) -> tuple[float, float, str | None] | None:
    """Return the ends of `log:1..100`, integers if both are, and its scale; None for anything but a range."""
    match = _RANGE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    low, high = (read_yaml(text).values for text in (match[2], match[3]))
    for bound in (low, high):
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound):
            return None  # a text with two dots
    return low, high, match[1]


def bounds_of(space: Space, axes: Sequence[Axis]) -> Iterator[Values]:
    """Yield the points at which a space is checked: both ends of each range, and every choice."""
    ends: dict[str, Sequence[Any]] = {}
    for axis in axes:
        if axis.key in space:
            domain = space[axis.key]
            ends[axis.key] = axis.values if isinstance(domain, CategoricalDistribution) else (domain.low, domain.high)
    first = {key: values[0] for key, values in ends.items()}
    yield first
    for key, values in ends.items():
        yield from ({**first, key: value} for value in values[1:])


def is_inside(values: Values, space: Space) -> bool:
    """Return whether the values are in the space, which may have changed since they were chosen."""
    return values.keys() == space.keys() and all(contains(space[key], value) for key, value in values.items())


def contains(domain: Distribution, value: Any) -> bool:
    """Return whether the value is one of the choices, or a number in the range."""
    if isinstance(domain, CategoricalDistribution):
        return value_text(value) in domain.choices
    return isinstance(value, int | float) and domain.low <= value <= domain.high
