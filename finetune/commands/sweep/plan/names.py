"""Names of runs: readable, made from the values alone, safe as names of folders, and never the same for two runs."""

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from finetune.commands.sweep.plan.axes import shown_value, value_text
from finetune.runtime.text.redact import comparable_config

_MAX_VALUE_LENGTH, _MAX_LENGTH = 40, 120
"""Characters of a value, and of a whole name; a file system allows 255 bytes, and files beside it have longer names."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")


def run_name(values: Mapping[str, Any], *, taken: Collection[str] = ()) -> str:
    """Return the name of the run with these values of the swept keys; none of those that are taken.

    >>> run_name({"train.learning_rate": 1e-4, "model.lora.rank": 8})
    'learning_rate=0.0001,rank=8'
    """
    if not values:
        return "run"
    labels = short_keys(list(values))
    shown = {key: comparable_config(value, name=key) for key, value in values.items()}
    name = ",".join(f"{labels[key]}={_safe_text(value)}" for key, value in shown.items())
    digest = _digest(dict(values))
    if len(name) > _MAX_LENGTH:
        name = f"{name[: _MAX_LENGTH - 7]}-{digest[:6]}"
    return name if name not in taken else f"{name}-{digest[:12]}"


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return for each key as few of its last parts as tell it from the others.

    >>> short_keys(["train.optimizer.name", "train.schedule.name", "run.seed"])
    {'train.optimizer.name': 'optimizer.name', 'train.schedule.name': 'schedule.name', 'run.seed': 'seed'}
    """
    return {
        key: next((end for end in _ends(key) if sum(_ends_with(other, end) for other in keys) == 1), key)
        for key in keys
    }


def _ends(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[start:]) for start in reversed(range(len(parts)))]


def _ends_with(key: str, end: str) -> bool:
    return key == end or key.endswith(f".{end}")


def _safe_text(value: Any) -> str:
    """Return the value as part of a name; where that does not say all of it, with a digest."""
    shown = shown_value(value)
    whole = shown.strip('"').rstrip("/")
    last = whole.rpartition("/")[2] if isinstance(value, str) else whole
    text = _UNSAFE.sub("-", last).strip("-.")[:_MAX_VALUE_LENGTH]
    if text == shown or isinstance(value, int | float) or value is None:
        return shown
    return "-".join(part for part in (text, _digest(value)[:6]) if part)


def _digest(value: Any) -> str:
    return hashlib.sha256(value_text(value).encode(errors="backslashreplace")).hexdigest()
