"""Gate 5: two processes, against a DDP loop written by hand and against Trainer driving the same strategy."""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from contest.finding import Finding, Spread
from contest.jobs import write_job
from contest.measured import Measured, Say, Table
from contest.pairs import WORLD, Pairs, PairSheet
from contest.steps import make
from contest.workloads import Sizes, Workload

STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")
TOLERANCE = 1e-4
"""Of a step's mean loss, relative: sums are rounded in another order by every strategy."""


@dataclass(frozen=True)
class Played:
    """A strategy that has been played."""

    strategy: str
    sheets: Mapping[str, PairSheet]

    def ratio(self, theirs: str) -> Spread:
        """Return CPU-seconds a step, theirs / ours: how many times as fast ours is."""
        return Spread.of_ratios(self.sheets[theirs].seconds, self.sheets["ours"].seconds)

    @property
    def apart(self) -> float:
        """Return by how much losses differ at most between the contestants, relative."""
        columns = list(zip(*(sheet.losses for sheet in self.sheets.values()), strict=True))
        return float(max((max(losses) - min(losses)) / min(losses) for losses in columns))


def measure(folder: Path, *, is_quick: bool, say: Say) -> Measured:
    """Return gate 5."""
    folder = folder.resolve()
    workload = Workload(
        *("pairs", "two processes, fixed length", (), 5 if is_quick else 30, "fixed"),
        *(Sizes(4096, 256, 688, 4), 128, 128, 8, 2),
    )
    make(folder, [workload], data=folder, seed=0)
    write_pair_job(folder / workload.name, workload)
    missing = [] if importlib.util.find_spec("deepspeed") else ["gate 5, ZeRO: deepspeed is not installed"]
    strategies = STRATEGIES[:2] if missing else STRATEGIES
    played = []
    with Pairs(("bare", "trainer", "ours"), folder=folder) as pairs:
        for strategy in strategies:
            names = contestants(strategy, is_quick=is_quick)
            times = {"rounds": workload.rounds, "warm_up": workload.warm_up}
            played.append(Played(strategy, pairs.play(folder / workload.name, strategy, names, **times)))
            say(summary(played[-1]))
    note = (folder / workload.name / "note").read_text()
    record = {each.strategy: {name: sheet.record() for name, sheet in each.sheets.items()} for each in played}
    missing += [
        f"gate 5, {each.strategy}: losses differ by {each.apart:.1e}" for each in played if each.apart > TOLERANCE
    ]
    return Measured(
        [found for each in played for found in findings(each, note)], [table(played, note)], record, missing
    )


def contestants(strategy: str, *, is_quick: bool) -> tuple[str, ...]:
    """Return who plays: Trainer's DDP is no gate and left out where it is to be quick."""
    if strategy != "ddp":
        return ("trainer", "ours")
    return ("bare", "ours") if is_quick else ("bare", "trainer", "ours")


def write_pair_job(folder: Path, workload: Workload) -> Path:
    """Write the product's job for so many processes and return its path; each takes one microbatch a step."""
    text = write_job(folder, workload).read_text()
    whole, share = f"microbatch_size: {workload.batch}", f"microbatch_size: {workload.batch // WORLD}"
    assert whole in text, text
    path = folder / "pair.yaml"
    path.write_text(text.replace(whole, share))
    return path


def findings(played: Played, note: str) -> list[Finding]:
    """Return what the strategy says about the gate."""
    if played.strategy == "ddp":
        what, theirs, limit = "ddp: speed, ours / hand-written DDP", "bare", 0.98
    else:
        what, theirs, limit = f"{played.strategy}: speed, ours / Trainer driving it", "trainer", 1.0
    return [Finding(5, what, played.ratio(theirs), limit, "higher", note=f"CPU-seconds of both ranks; {note}")]


def table(played: list[Played], note: str) -> Table:
    """Return what every pair's step costs."""
    rows = []
    for each in played:
        for name, sheet in each.sheets.items():
            cost, wall = Spread.of(sheet.seconds), Spread.of(sheet.wall_seconds)
            against = "" if name == "ours" else f"{each.ratio(name)}"
            rows.append(
                (
                    each.strategy,
                    name,
                    f"{1000 * cost.median:.1f}",
                    f"{1000 * wall.median:.1f}",
                    against,
                    f"{each.apart:.1e}",
                )
            )
    header = ("strategy", "contestant", "CPU-ms a step, both ranks", "wall ms", "speed, ours / theirs", "losses apart")
    load = f"load of the machine: {os.getloadavg()[0]:.1f}; wall counts only on an idle one"
    return Table("Two processes (gloo, one thread each)", header, rows, f"{note}; {load}")


def summary(played: Played) -> str:
    """Return the strategy in one line."""
    against = ", ".join(f"{played.ratio(name)} of {name}" for name in played.sheets if name != "ours")
    return f"{played.strategy}: speed {against}; losses apart by {played.apart:.1e}"
