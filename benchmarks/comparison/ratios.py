"""From what everybody's steps have cost to ratios: the results of topics 1 to 3."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from comparison.controller import StepCosts
from comparison.results import Result, Spread
from comparison.workloads import BEST_OF_TRL, EQUAL, Workload

TOLERANCE = 1e-5
"""Of a step's mean loss, relative."""

NUM_COMPARED = 20
"""Steps whose losses are compared: rounding errors grow from step to step."""


@dataclass(frozen=True)
class Measured:
    """A workload that has been measured."""

    workload: Workload
    lengths: str  # in words
    costs: Mapping[str, StepCosts]

    def speed(self, ours: str, theirs: str) -> Spread:
        """Return tokens that are no padding per CPU-second, ours / theirs, round by round."""
        return Spread.of_ratios(self.costs[theirs].seconds_per_token, self.costs[ours].seconds_per_token)

    def extra_milliseconds(self, ours: str, theirs: str) -> Spread:
        """Return the CPU-milliseconds a step that ours costs more, round by round."""
        pairs = zip(self.costs[ours].seconds, self.costs[theirs].seconds, strict=True)
        return Spread.of([1000 * (mine - other) for mine, other in pairs])

    def fastest(self, names: Sequence[str]) -> str:
        """Return the fastest of those that were measured."""
        present = [name for name in names if name in self.costs]
        return min(present, key=lambda name: Spread.of(self.costs[name].seconds_per_token).median)

    def loss_difference(self, name: str) -> float:
        """Return by how much its losses differ from the bare loop's at most, relative; NaN where one of them is."""
        losses, reference = (np.array(self.costs[each].losses[:NUM_COMPARED]) for each in (name, "bare"))
        return float(np.max(np.abs(losses - reference) / np.abs(reference)))

    def differing(self) -> dict[str, float]:
        """Return the competitors whose losses must equal the bare loop's and do not, with the difference."""
        differences = {name: self.loss_difference(name) for name in self.costs if name in EQUAL}
        return {name: most for name, most in differences.items() if not most <= TOLERANCE}


def results(measured: Measured) -> list[Result]:
    """Return what the workload's thresholds and aims are held against."""
    by_workload = {"lognormal": _varying, "gsm8k": _varying, "fixed": _fixed, "tiny": _tiny}
    return by_workload[measured.workload.name](measured)


def memory_results(measured: Measured) -> list[Result]:
    """Return the peaks of processes that have done nothing else, ours as a share of each peer's."""
    peaks = {name: costs.peak_bytes for name, costs in measured.costs.items()}
    return [
        Result(
            *(3, f"{measured.workload.name}: peak resident memory, ours / {theirs}"),
            *(Spread.of([peaks["ours"] / peaks[theirs]]), threshold, "lower"),
            note=measured.lengths,
        )
        for theirs, threshold in (("trainer", 0.55), ("trl equal", 0.40))
        if {theirs, "ours"} <= set(peaks)
    ]


def _varying(measured: Measured) -> list[Result]:
    """Return the ratios where lengths vary. On GSM8K, whose lengths vary less, all of them are aims."""
    best, is_aim = measured.fastest(("ours", "ours tuned")), measured.workload.name == "gsm8k"
    against: list[tuple[str, tuple[str, ...], float]] = [
        *(("ours", ("trainer",), 2.0), (best, ("trainer grouped",), 1.1)),
        *(("ours", ("trl equal",), 2.8), (best, BEST_OF_TRL, 1.35)),
    ]
    if is_aim:
        against.append((best, ("trainer",), 3.0))
    present = [(mine, theirs, threshold) for mine, theirs, threshold in against if set(theirs) & set(measured.costs)]
    return [
        _speed(measured, mine, measured.fastest(theirs), threshold, is_aim=is_aim)
        for mine, theirs, threshold in present
    ]


def _fixed(measured: Measured) -> list[Result]:
    """Return the overhead of a long step; and packing must lose nothing where there is nothing to gain."""
    return [
        *(_overhead(measured, ours) for ours in ("ours equal", "ours")),
        *(_speed(measured, ours, "bare", 0.98) for ours in ("ours", "ours tuned")),
    ]


def _tiny(measured: Measured) -> list[Result]:
    """Return what the framework itself costs, and as an aim what rows without padding add to it."""
    return [
        Result(
            *(1, f"tiny: CPU-time a step, {ours} - bare", measured.extra_milliseconds(ours, "bare"), 1.0, "lower"),
            unit="ms",
            is_aim=ours == "ours",
            note=measured.lengths,
        )
        for ours in ("ours equal", "ours")
    ]


def _speed(measured: Measured, ours: str, theirs: str, threshold: float, *, is_aim: bool = False) -> Result:
    what = f"{measured.workload.name}: non-pad tokens per CPU-second, {ours} / {theirs}"
    speed = measured.speed(ours, theirs)
    return Result(2, what, speed, threshold, "higher", is_aim=is_aim, note=measured.lengths)


def _overhead(measured: Measured, ours: str) -> Result:
    costs, bare = measured.costs[ours], measured.costs["bare"]
    what = f"{measured.workload.name}: CPU-time of a {1000 * Spread.of(bare.seconds).median:.0f} ms step, {ours} / bare"
    return Result(1, what, Spread.of_ratios(costs.seconds, bare.seconds), 1.02, "lower", note=measured.lengths)
