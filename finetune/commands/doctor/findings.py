"""Findings of `finetune doctor`, whose texts are in `findings.toml`."""

import string
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib import resources
from typing import Any

from finetune.runtime.resources import format_size


class Severity(IntEnum):
    """The consequence of not fixing a finding."""

    MUST_FIX = 0  # a run fails, hangs or computes wrong results
    SHOULD_FIX = 1  # a run is slower or more fragile than necessary
    NOTE = 2


LABELS = {Severity.MUST_FIX: "FIX", Severity.SHOULD_FIX: "SHOULD", Severity.NOTE: "note"}


@dataclass(frozen=True)
class Finding:
    """A problem of a machine, a rank or a launch, with its fix."""

    key: str  # the name of the check, as in docs/how-to/before-a-run.md
    severity: Severity
    what: str
    why: str
    fix: str
    hosts: tuple[str, ...] = ()  # empty: all hosts

    def __str__(self) -> str:
        where = f" [{', '.join(self.hosts)}]" if self.hosts else ""
        return f"{LABELS[self.severity]}: {self.what}{where}\n    why: {self.why}\n    fix: {self.fix}"


class _Formatter(string.Formatter):
    """Formats numbers of bytes (`size`) and lists (`list`), too."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "size":
            return format_size(round(value))
        if format_spec == "list":
            return ", ".join(map(str, value))
        return str(super().format_field(value, format_spec))


@cache
def finding_texts() -> Mapping[str, tuple[Severity, Mapping[str, str]]]:
    """Return the severity and the texts of each finding by its key."""
    groups = tomllib.loads(resources.files(__package__).joinpath("findings.toml").read_text(encoding="utf-8"))
    return {key: (Severity[severity], texts) for severity, rows in groups.items() for key, texts in rows.items()}


def make_finding(key: str, values: Mapping[str, Any]) -> Finding:
    """Return the finding of `findings.toml`, filled with the values."""
    severity, texts = finding_texts()[key]
    what, why, fix = (_Formatter().vformat(texts[part], (), values) for part in ("what", "why", "fix"))
    return Finding(key, severity, what, why, fix)
