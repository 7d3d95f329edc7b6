"""`--set train.learning_rate=1e-4,2e-4`: the values of each key, as YAML reads them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.config.overrides import apply_overrides, override_label
from finetune.config.section import parent_keys
from finetune.config.yaml import read_yaml
from finetune.errors import ConfigError, Problem
from finetune.runtime.text.redact import comparable_config
from finetune.runtime.text.terminal import format_json

FORBIDDEN = {
    "run.folder": "each run gets a folder of its own. Write `--folder SWEEP` for the folder of all.",
    "run.local_folder": "the runs of a sweep are written to local folders. Write `--folder SWEEP`.",
    "checkpoint.resume": "an interrupted sweep resumes each run from its own checkpoints. Remove it.",
}
"""Keys that the sweep itself sets."""


@dataclass(frozen=True)
class Axis:
    """A key and the values that were written for it; with one value it is the same in every run."""

    key: str
    values: tuple[Any, ...]
    label: str  # how messages name it

    @property
    def is_swept(self) -> bool:
        """Return whether runs differ in it."""
        return len(self.values) > 1


def parse_axes(written: Sequence[str]) -> list[Axis]:
    """Return the axes in the order written; raises ConfigError with every problem of the options at once.

    Commas separate values, except within brackets and quotes: the text is read as the items of a YAML list.
    """
    problems: list[Problem] = []
    axes: list[Axis] = []
    for text in written:
        key, _, values = text.partition("=")
        source = override_label(text)
        fault = next(iter(apply_overrides({}, [text]).problems), None) if not values.strip() else None
        if fault is None and key in FORBIDDEN:
            fault = Problem(key, FORBIDDEN[key], source=source)
        if fault is not None:
            problems.append(fault)
            continue
        try:
            axes.append(Axis(key, _read_values(values), source))
        except ValueError as error:
            problems.append(Problem(key, str(error), source=source))
    problems += [problem for number, axis in enumerate(axes) for problem in _conflicts(axis, others=axes[:number])]
    problems += [problem for axis in axes for problem in _repeated(axis)]
    if problems:
        raise ConfigError(problems, "the sweep")
    return axes


def _read_values(text: str) -> tuple[Any, ...]:
    """Return the values; raises ValueError with what is wrong."""
    if text.rstrip().endswith(",") or text.lstrip().startswith(","):
        raise ValueError("a value is missing beside a comma. Remove the comma, or write the value.")
    document = read_yaml(f"[{text}]")
    if not document.problems and isinstance(document.values, list) and document.values:
        return tuple(document.values)
    single = read_yaml(text)  # a section or a list on several lines is one value
    if single.problems or not isinstance(single.values, dict | list):
        message = (document.problems or single.problems or [Problem("", "there is no value.")])[0].message
        raise ValueError(f"{message} Put a text with commas, brackets or colons in quotes.")
    return (single.values,)


def _conflicts(axis: Axis, *, others: Sequence[Axis]) -> Iterator[Problem]:
    for other in others:
        if axis.key == other.key:
            message = f"the key is also in `{other.label}`. Write all its values in one `--set`."
            yield Problem(axis.key, message, source=axis.label)
        elif (axis.is_swept or other.is_swept) and _is_nested(axis.key, other.key):
            message = f"the key overlaps with `{other.key}` of `{other.label}`. Sweep only one of them."
            yield Problem(axis.key, message, source=axis.label)


def _is_nested(one: str, other: str) -> bool:
    return one in parent_keys(other) or other in parent_keys(one)


def _repeated(axis: Axis) -> Iterator[Problem]:
    texts = [value_text(comparable_config(value, name=axis.key)) for value in axis.values]
    for text in sorted({each for each in texts if texts.count(each) > 1}):
        same = [value for value, each in zip(axis.values, texts, strict=True) if each == text]
        what = f"the value {text} is written {len(same)} times."
        if any(value != same[0] for value in same):
            what = f"values differ in their secrets alone, and secrets name no run: {text}. Write one of them."
        yield Problem(axis.key, what, source=axis.label)


def value_text(value: Any) -> str:
    """Return the value as one text that is the same for the same value, without secrets."""
    return format_json(comparable_config(value), sort_keys=True)


def override_of(key: str, value: Any) -> str:
    """Return the `KEY=VALUE` that a run is started with; YAML reads exactly this value from it."""
    return f"{key}={format_json(value)}"


_WORD = re.compile(r"[A-Za-z_][\w.+-]*")


def shown_value(value: Any) -> str:
    """Return the value for tables and names: numbers as short as they can be, plain words without quotes.

    >>> shown_value(1e-4), shown_value(2e-05), shown_value("cosine"), shown_value([1, 2]), shown_value(None)
    ('0.0001', '2e-05', 'cosine', '[1, 2]', 'null')
    """
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    if isinstance(value, str) and _WORD.fullmatch(value) and read_yaml(value).values == value:
        return value
    return format_json(comparable_config(value))
