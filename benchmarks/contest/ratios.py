"""From what every contestant's steps have cost to ratios: the findings of gates 1 to 3."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from contest.controller import Sheet
from contest.finding import Finding, Spread
from contest.workloads import BEST_OF_TRL, Workload

TOLERANCE = 1e-5
"""Of a step's mean loss, relative."""

COMPARED = 20
"""Steps whose losses are compared: rounding grows from step to step."""


@dataclass(frozen=True)
class Played:
    """A workload that has been played."""

    workload: Workload
    note: str  # its lengths in words
    sheets: Mapping[str, Sheet]

    def speed(self, ours: str, theirs: str) -> Spread:
        """Return tokens that are no padding per CPU-second, ours against theirs, round by round."""
        return Spread.of_ratios(self.sheets[theirs].token_seconds, self.sheets[ours].token_seconds)

    def more_milliseconds(self, ours: str, theirs: str) -> Spread:
        """Return the CPU-milliseconds a step that ours costs more, round by round."""
        pairs = zip(self.sheets[ours].seconds, self.sheets[theirs].seconds, strict=True)
        return Spread.of([1000 * (mine - other) for mine, other in pairs])

    def best(self, names: Sequence[str]) -> str:
        """Return the fastest of them."""
        there = [name for name in names if name in self.sheets]
        return min(there, key=lambda name: Spread.of(self.sheets[name].token_seconds).median)


def differing(played: Played, *, among: Sequence[str]) -> dict[str, float]:
    """Return whose losses differ from the bare loop's by more than the tolerance, and by how much at most."""
    apart = {name: furthest(played, name) for name in played.sheets if name in among}
    return {name: most for name, most in apart.items() if not most <= TOLERANCE}


def furthest(played: Played, name: str) -> float:
    """Return how far its losses are from the bare loop's at most, relative to them."""
    theirs, reference = (np.array(played.sheets[each].losses[:COMPARED]) for each in (name, "bare"))
    return float(np.max(np.abs(theirs - reference) / np.abs(reference)))  # NaN where one of them is


def findings(played: Played) -> list[Finding]:
    """Return what the workload says about the gates."""
    return {
        "lognormal": _varying,
        "gsm8k": _varying,
        "fixed": _fixed,
        "tiny": _tiny,
        "text": _beyond,
        "vocabulary": _beyond,
        "lora": _beyond,
    }[played.workload.name](played)


def memory_findings(played: Played) -> list[Finding]:
    """Return gate 3, of processes that have played nothing else."""
    peaks = {name: sheet.peak_bytes for name, sheet in played.sheets.items()}
    found = []
    for theirs, limit in (("trainer", 0.55), ("trl equal", 0.40)):
        if theirs in peaks and "ours" in peaks:
            ratio = Spread.of([peaks["ours"] / peaks[theirs]])
            what = f"{played.workload.name}: peak resident memory, ours / {theirs}"
            found.append(Finding(3, what, ratio, limit, "lower", note=played.note))
    return found


def _varying(played: Played) -> list[Finding]:
    """Return gate 2. On GSM8K, whose lengths vary less, its limits are aims beside that of 3 times Trainer."""
    best, is_aim = played.best(("ours", "ours tuned")), played.workload.name == "gsm8k"
    against: list[tuple[str, tuple[str, ...], float]] = [
        *(("ours", ("trainer",), 2.0), (best, ("trainer grouped",), 1.6)),
        *(("ours", ("trl equal",), 2.8), (best, BEST_OF_TRL, 2.3)),
    ]
    if is_aim:
        against.append((best, ("trainer",), 3.0))
    there = [(mine, theirs, limit) for mine, theirs, limit in against if set(theirs) & set(played.sheets)]
    return [_speed(played, mine, played.best(theirs), limit, is_aim=is_aim) for mine, theirs, limit in there]


def _fixed(played: Played) -> list[Finding]:
    """Return gate 1 at a long step, and gate 2's last line: packing must not lose where nothing is to be won."""
    return [
        _time(played, "ours equal", 1.02),
        _time(played, "ours", 1.02),
        _speed(played, "ours", "bare", 0.98),
        _speed(played, "ours tuned", "bare", 0.98),
    ]


def _tiny(played: Played) -> list[Finding]:
    """Return gate 1 at a tiny step: what the framework itself costs, and beside it what rows end to end add to that."""
    found = []
    for ours in ("ours equal", "ours"):
        more, is_aim = played.more_milliseconds(ours, "bare"), ours == "ours"
        what = f"tiny: CPU-time a step, {ours} - bare"
        found.append(Finding(1, what, more, 1.0, "lower", unit="ms", is_aim=is_aim, note=played.note))
    return found


def _beyond(played: Played) -> list[Finding]:
    """Return what no gate asks for, beside what gate 2 asks for elsewhere."""
    against = {"trainer": 2.0, "trl equal": 2.8}
    there = [(theirs, limit) for theirs, limit in against.items() if theirs in played.sheets]
    return [_speed(played, "ours", theirs, limit, is_aim=True) for theirs, limit in there]


def _speed(played: Played, ours: str, theirs: str, limit: float, *, is_aim: bool = False) -> Finding:
    what = f"{played.workload.name}: non-pad tokens per CPU-second, {ours} / {theirs}"
    return Finding(2, what, played.speed(ours, theirs), limit, "higher", is_aim=is_aim, note=played.note)


def _time(played: Played, ours: str, limit: float) -> Finding:
    better: Literal["lower"] = "lower"
    milliseconds = 1000 * Spread.of(played.sheets["bare"].seconds).median
    what = f"{played.workload.name}: CPU-time of a {milliseconds:.0f} ms step, {ours} / bare"
    ratio = Spread.of_ratios(played.sheets[ours].seconds, played.sheets["bare"].seconds)
    return Finding(1, what, ratio, limit, better, note=played.note)
