"""What a part of the comparison hands back: findings for the gates, tables for the reader, figures for the record."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from contest.finding import Finding

Say = Callable[[str], None]


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; `note` says what was measured, with its lengths and its setting."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Measured:
    """What a part has measured; `missing` names gates that could not be measured, and why, which fails `--check`."""

    findings: Sequence[Finding] = ()
    tables: Sequence[Table] = ()
    record: dict[str, Any] = field(default_factory=dict)
    missing: Sequence[str] = ()  # "gate 2, TRL: trl is not installed (pip install -e '.[benchmark]')"


class Part(Protocol):
    """Measures some of the gates in a folder of its own; raises an error with a message where it cannot."""

    def __call__(self, folder: Path, *, is_quick: bool, say: Say) -> Measured: ...
