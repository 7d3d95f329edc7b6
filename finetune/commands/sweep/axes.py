"""The values of `--set KEY=V1,V2`, as YAML reads them: the points of a grid, the space of a search, the names of runs.

A space has one of Optuna's distributions for each swept key: choices, or a range such as `1e-5..1e-3`.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from finetune.config.overrides import apply_overrides, override_label
from finetune.config.section import parent_keys
from finetune.config.yaml import read_yaml
from finetune.errors import ConfigError, Problem, UserError
from finetune.runtime.optional import lazily
from finetune.runtime.text.redact import comparable_config
from finetune.runtime.text.terminal import format_json

with lazily():
    from optuna import distributions

Values = Mapping[str, Any]
"""The values of the swept keys of one run."""

Distribution: TypeAlias = (
    "distributions.CategoricalDistribution | distributions.FloatDistribution | distributions.IntDistribution"
)
Space = Mapping[str, Distribution]
"""The distribution of each swept key; the choices are the texts of values, without secrets."""

FORBIDDEN = {
    "run.folder": "each run gets a folder of its own. Write `--folder SWEEP` for the folder of all.",
    "run.local_folder": "the runs of a sweep are written to local folders. Write `--folder SWEEP`.",
    "checkpoint.resume": "an interrupted sweep resumes each run from its own checkpoints. Remove it.",
}
"""Keys that the sweep itself sets."""


@dataclass(frozen=True)
class Axis:
    """A key and its values; a key with a single value is the same in every run."""

    key: str
    values: tuple[Any, ...]
    label: str  # for messages

    @property
    def is_swept(self) -> bool:
        """Return whether the key has several values."""
        return len(self.values) > 1


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    """Return the axes in the order of the options; raises ConfigError with all problems of the options.

    Commas separate values, except within brackets and quotes: the text is read as the items of a YAML list.
    """
    problems: list[Problem] = []
    axes: list[Axis] = []
    for text in texts:
        key, _, values = text.partition("=")
        source = override_label(text)
        if not values.strip() and (faults := apply_overrides({}, [text]).problems):
            problems.append(faults[0])
        elif key in FORBIDDEN:
            problems.append(Problem(key, FORBIDDEN[key], source=source))
        else:
            try:
                axes.append(Axis(key, _read_values(values), source))
            except ValueError as error:
                problems.append(Problem(key, str(error), source=source))
    for number, axis in enumerate(axes):
        messages = []
        for other in axes[:number]:
            is_nested = axis.key in parent_keys(other.key) or other.key in parent_keys(axis.key)
            if axis.key == other.key:
                messages.append(f"the key is also in `{other.label}`. Write all its values in one `--set`.")
            elif is_nested and (axis.is_swept or other.is_swept):
                messages.append(f"the key overlaps with `{other.key}` of `{other.label}`. Sweep only one of them.")
        shown = [shown_value(comparable_config(value, name=axis.key)) for value in axis.values]
        repeated = sorted({text for text in shown if shown.count(text) > 1})
        messages += [f"the value {text} is written {shown.count(text)} times." for text in repeated]
        problems += [Problem(axis.key, message, source=axis.label) for message in messages]
    if problems:
        raise ConfigError(problems, "the sweep")
    return axes


def _read_values(text: str) -> tuple[Any, ...]:
    if text.rstrip().endswith(",") or text.lstrip().startswith(","):
        raise ValueError("a value is missing next to a comma. Remove the comma, or write the value.")
    document = read_yaml(f"[{text}]")
    if not document.problems and isinstance(document.values, list) and document.values:
        return tuple(document.values)
    single = read_yaml(text)  # a section or a list on several lines is one value
    if single.problems or not isinstance(single.values, dict | list):
        message = (document.problems or single.problems or [Problem("", "the value is missing.")])[0].message
        raise ValueError(f"{message} Put a text with commas, brackets or colons in quotes.")
    return (single.values,)


def grid_points(axes: Sequence[Axis]) -> list[Values]:
    """Return every combination of the values of the swept keys; the last key changes fastest."""
    swept = [axis for axis in axes if axis.is_swept]
    combinations = itertools.product(*(axis.values for axis in swept))
    return [dict(zip((axis.key for axis in swept), values, strict=True)) for values in combinations]


_RANGE = re.compile(r"(?:(log|linear):)?([^.].*?)\.\.([^.].*)")
_LOG_RATIO = 100.0
"""A range over at least two decades is searched on a logarithmic scale."""


def parse_space(axes: Sequence[Axis], *, is_search: bool) -> Space:
    """Return the range or choices of each swept key; keys with one value are omitted.

    Raises ConfigError for an invalid range, UserError for a range in a grid, or for a search in which nothing varies.
    """
    space: dict[str, Distribution] = {}
    problems = []
    for axis in axes:
        ranges = [bounds for bounds in map(_read_range, axis.values) if bounds is not None]
        if ranges and not is_search:
            raise UserError(f"{axis.label}: a range needs --search N. For a grid write the values, with commas.")
        if axis.is_swept:
            space[axis.key] = distributions.CategoricalDistribution([value_text(value) for value in axis.values])
        elif ranges:
            low, high, scale = ranges[0]
            is_log = scale == "log" or (scale is None and low > 0 and high / low >= _LOG_RATIO)
            if low >= high or (is_log and low <= 0):
                message = f"{low:g}..{high:g}: write the smaller number first; on a logarithmic scale it is positive."
                problems.append(Problem(axis.key, message, source=axis.label))
            elif isinstance(low, int) and isinstance(high, int):
                space[axis.key] = distributions.IntDistribution(low, high, log=is_log)
            else:
                space[axis.key] = distributions.FloatDistribution(low, high, log=is_log)
    if problems:
        raise ConfigError(problems, "the sweep")
    if is_search and not space:
        raise UserError("--search: nothing varies. Write a range, such as --set train.learning_rate=1e-5..1e-3.")
    return space


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
            ends[axis.key] = (
                axis.values if isinstance(domain, distributions.CategoricalDistribution) else (domain.low, domain.high)
            )
    first = {key: values[0] for key, values in ends.items()}
    yield first
    for key, values in ends.items():
        yield from ({**first, key: value} for value in values[1:])


def is_inside(values: Values, space: Space) -> bool:
    """Return whether the values are in the space, which may have changed since they were chosen."""
    return values.keys() == space.keys() and all(contains(space[key], value) for key, value in values.items())


def contains(domain: Distribution, value: Any) -> bool:
    """Return whether the value is one of the choices, or a number in the range."""
    if isinstance(domain, distributions.CategoricalDistribution):
        return value_text(value) in domain.choices
    return isinstance(value, int | float) and domain.low <= value <= domain.high


def value_text(value: Any) -> str:
    """Return a canonical text of the value, without secrets."""
    return format_json(comparable_config(value), sort_keys=True)


_WORD = re.compile(r"[A-Za-z_][\w.+-]*")


def shown_value(value: Any) -> str:
    """Return the value for tables and names: numbers as short as possible, plain words without quotes.

    >>> shown_value(1e-4), shown_value(2e-05), shown_value("cosine"), shown_value([1, 2]), shown_value(None)
    ('0.0001', '2e-05', 'cosine', '[1, 2]', 'null')
    """
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    if isinstance(value, str) and _WORD.fullmatch(value) and read_yaml(value).values == value:
        return value
    return format_json(comparable_config(value))


_MAX_VALUE_LENGTH, _MAX_NAME_LENGTH = 40, 120
"""Characters of a value, and of a whole name; a file system allows 255 bytes, and log files have longer names."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")


def run_name(values: Values) -> str:
    """Return the name of the run with these values of the swept keys, which is safe as a folder name.

    >>> run_name({"train.learning_rate": 1e-4, "model.lora.rank": 8})
    'learning_rate=0.0001,rank=8'
    """
    if not values:
        return "run"
    labels = short_keys(list(values))
    shown = {key: comparable_config(value, name=key) for key, value in values.items()}
    texts = {key: shown_value(value) for key, value in shown.items()}
    for key, value in shown.items():
        if isinstance(value, int | float) or value is None:
            continue
        whole = texts[key].strip('"').rstrip("/")
        text = _UNSAFE.sub("-", whole.rpartition("/")[2] if isinstance(value, str) else whole)
        text = text.strip("-.")[:_MAX_VALUE_LENGTH]
        if text != texts[key]:  # characters were removed
            texts[key] = "-".join(part for part in (text, _digest(value)[:6]) if part)
    name = ",".join(f"{labels[key]}={text}" for key, text in texts.items())
    if len(name) > _MAX_NAME_LENGTH:
        return f"{name[: _MAX_NAME_LENGTH - 7]}-{_digest(dict(values))[:6]}"
    return name


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest ending of each key that distinguishes it from the others.

    >>> short_keys(["train.optimizer.name", "train.schedule.name", "run.seed"])
    {'train.optimizer.name': 'optimizer.name', 'train.schedule.name': 'schedule.name', 'run.seed': 'seed'}
    """
    labels = {}
    for key in keys:
        parts = key.split(".")
        endings = [".".join(parts[start:]) for start in reversed(range(len(parts)))]
        unique = (end for end in endings if sum(f".{other}".endswith(f".{end}") for other in keys) == 1)
        labels[key] = next(unique, key)
    return labels


def _digest(value: Any) -> str:
    return hashlib.sha256(value_text(value).encode(errors="backslashreplace")).hexdigest()
