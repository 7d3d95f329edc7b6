"""What was measured, and whether it is within the gate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np


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
class Finding:
    """One measured quantity beside the limit that the gate sets it."""

    gate: int  # its number in benchmarks/README.md
    what: str  # "GSM8K: non-pad tokens per CPU-second, ours / Trainer"
    spread: Spread
    limit: float
    better: Literal["lower", "higher"]
    unit: str = ""  # of value and limit; empty for a ratio
    is_aim: bool = False  # an aim beyond the gate: shown, never a failure
    note: str = ""  # the length distribution, the setting

    @property
    def is_met(self) -> bool:
        """Tell whether the median is within the limit."""
        return self.spread.median <= self.limit if self.better == "lower" else self.spread.median >= self.limit

    @property
    def is_missed(self) -> bool:
        """Tell whether the limit is missed by more than the measured spread, the quartile nearer to it included."""
        nearest = self.spread.low if self.better == "lower" else self.spread.high
        within = nearest <= self.limit if self.better == "lower" else nearest >= self.limit
        return not (self.is_met or within or self.is_aim)

    @property
    def verdict(self) -> str:
        """Return `met`, `within the spread`, `MISSED` or, for an aim, `not reached`."""
        if self.is_met:
            return "met"
        if self.is_aim:
            return "not reached"
        return "MISSED" if self.is_missed else "within the spread"

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "gate": self.gate,
            "what": self.what,
            "low": self.spread.low,
            "median": self.spread.median,
            "high": self.spread.high,
            "count": self.spread.count,
            "limit": self.limit,
            "better": self.better,
            "unit": self.unit,
            "verdict": self.verdict,
            "note": self.note,
        }
