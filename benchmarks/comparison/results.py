"""What a part of the comparison returns: values beside their thresholds, tables, and figures for the record."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

Log = Callable[[str], None]


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements and their quartiles."""

    low: float
    median: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        low, median, high = (float(each) for each in np.percentile(np.asarray(values, float), (25, 50, 75)))
        return cls(low, median, high, len(values))

    @classmethod
    def of_ratios(cls, ours: Sequence[float], theirs: Sequence[float]) -> "Spread":
        """Return the spread of ours / theirs, round by round: both were measured in the same rounds."""
        return cls.of([one / other for one, other in zip(ours, theirs, strict=True)])

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}-{self.high:.3g}, n={self.count})"


@dataclass(frozen=True)
class Result:
    """One measured value beside its threshold."""

    topic: int  # the number of its row in benchmarks/README.md
    what: str  # "gsm8k: non-pad tokens per CPU-second, ours / trainer"
    spread: Spread
    threshold: float
    better: Literal["lower", "higher"]
    unit: str = ""  # of value and threshold; empty for a ratio
    is_aim: bool = False  # shown beside the thresholds, never a failure
    note: str = ""  # the length distribution, the setting

    @property
    def is_met(self) -> bool:
        """Tell whether the median is within the threshold."""
        return self._is_within(self.spread.median)

    @property
    def is_missed(self) -> bool:
        """Tell whether the threshold is missed by more than the spread: the nearer quartile misses it, too."""
        nearest = self.spread.low if self.better == "lower" else self.spread.high
        return not (self.is_aim or self.is_met or self._is_within(nearest))

    @property
    def verdict(self) -> str:
        """Return `met`, `within the spread`, `MISSED` or, for an aim, `not reached`."""
        if self.is_met:
            return "met"
        if self.is_aim:
            return "not reached"
        return "MISSED" if self.is_missed else "within the spread"

    @property
    def value_text(self) -> str:
        """Return the median with its quartiles and unit."""
        return f"{self.spread} {self.unit}".strip()

    @property
    def threshold_text(self) -> str:
        """Return the threshold as it is to be read, an aim named as such."""
        sign = "at most" if self.better == "lower" else "at least"
        return f"{'aim: ' if self.is_aim else ''}{sign} {self.threshold:g} {self.unit}".strip()

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**asdict(self), "verdict": self.verdict}

    def _is_within(self, value: float) -> bool:
        return value <= self.threshold if self.better == "lower" else value >= self.threshold


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; `note` says what was measured, with its lengths and its setting."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """Return the table as Markdown."""
        rows = [f"| {' | '.join(row)} |" for row in (self.header, ["---"] * len(self.header), *self.rows)]
        return "\n".join([f"### {self.title}", "", *rows, *(["", self.note] if self.note else []), ""])


def threshold_table(results: Sequence[Result]) -> Table:
    """Return the results next to their thresholds."""
    rows = [(str(each.topic), each.what, each.value_text, each.threshold_text, each.verdict) for each in results]
    return Table("Thresholds", ("topic", "what", "measured (quartiles)", "threshold", ""), rows)


@dataclass(frozen=True)
class PartResults:
    """What a part has measured; `missing` says what could not be measured, and why, which fails `--check`."""

    results: list[Result] = field(default_factory=list)
    tables: Sequence[Table] = ()
    record: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
