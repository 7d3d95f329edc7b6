"""Gates 1 to 3: first the losses are compared, then every workload is timed, all contestants taking turns."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from contest.controller import ROOT, ContestantDied, Controller, environment
from contest.measured import Measured, Say
from contest.ratios import Played, differing, findings, furthest, memory_findings
from contest.step_tables import peak_summary, summary, tables
from contest.workloads import EQUAL, Workload, equivalence, memory, workloads

MAKING_SECONDS = 600


class LossesDiffer(Exception):
    """The contestants do not do the same maths: nothing is timed."""


def measure(folder: Path, *, is_quick: bool, say: Say, data: Path, seed: int, only: Sequence[str] = ()) -> Measured:
    """Return gates 1 to 3; raises LossesDiffer where the contestants do not do the same maths."""
    folder = folder.resolve()
    chosen = [each for each in workloads(is_quick=is_quick) if not only or each.name in only]
    missing = absent()
    gate, first, *timed = [present(each) for each in (equivalence(), memory(), *chosen)]
    say(f"making {len(timed) + 2} workloads")
    make(folder, [gate, first, *timed], data=data, seed=seed)
    with Controller(folder, seed=seed) as controller:
        peaks = play(controller, folder, first, log=say, takes_turns=False)
        say(peak_summary(peaks))
        equal = play(controller, folder, gate, log=say, takes_turns=False)
        refuse_different(equal)
        all_played = [play(controller, folder, workload, log=say) for workload in timed]
    return collect(equal, peaks, all_played, missing=missing)


def collect(equal: Played, peaks: Played, all_played: Sequence[Played], *, missing: Sequence[str]) -> Measured:
    """Return what all of it says."""
    found = [finding for played in all_played for finding in findings(played)] + memory_findings(peaks)
    record = {
        played.workload.name: {
            "workload": played.workload.record(),
            "lengths": played.note,
            "contestants": {name: sheet.record() for name, sheet in played.sheets.items()},
            "apart": {name: furthest(played, name) for name in EQUAL if {name, "bare"} <= set(played.sheets)},
        }
        for played in (equal, peaks, *all_played)
    }
    return Measured(found, tables(equal, peaks, all_played), record, missing)


def make(folder: Path, chosen: Sequence[Workload], *, data: Path, seed: int) -> None:
    """Make the folders of the workloads, in a process of its own."""
    spec = folder / "spec.json"
    told = {"workloads": [each.record() for each in chosen], "data": str(data.resolve()), "seed": seed}
    spec.write_text(json.dumps(told))
    benchmarks = str(ROOT / "benchmarks")
    with (folder / "making.log").open("w") as log:
        code = subprocess.run(
            [sys.executable, str(Path(benchmarks, "make_workloads.py")), str(spec)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
            timeout=MAKING_SECONDS,
        ).returncode
    if code != 0:
        raise ContestantDied(f"the workloads could not be made:\n{(folder / 'making.log').read_text()[-3000:]}")


def play(controller: Controller, folder: Path, workload: Workload, *, say: Say, takes_turns: bool = True) -> Played:
    """Return what everybody's steps cost on the workload."""
    controller.seat(workload.contestants)
    note = (folder / workload.name / "note").read_text()
    say(f"{workload.name}: {workload.title}; {note}")
    sheets = controller.play(
        folder / workload.name,
        workload.contestants,
        rounds=workload.rounds,
        warm_up=workload.warm_up,
        takes_turns=takes_turns,
    )
    played = Played(workload, note, sheets)
    if takes_turns:
        say(summary(played))
    return played


def refuse_different(gate: Played) -> None:
    """Raise LossesDiffer for those whose losses differ from the bare loop's."""
    apart = differing(gate, among=EQUAL)
    if apart:
        named = ", ".join(f"{name} by {most:.1e}" for name, most in apart.items())
        raise LossesDiffer(
            f"the losses of the first {gate.workload.rounds} steps differ from the bare loop's: {named}. "
            "Who learns something else cannot be compared; nothing was timed."
        )


def absent() -> list[str]:
    """Return the gates that cannot be measured here, and why."""
    if importlib.util.find_spec("trl") is not None:
        return []
    return ["gates 1 to 3 against TRL: trl is not installed. Install it with: pip install -e '.[benchmark]'"]


def present(workload: Workload) -> Workload:
    """Return the workload with those contestants that are installed."""
    if not absent():
        return workload
    there = tuple(name for name in workload.contestants if not name.startswith("trl"))
    return replace(workload, contestants=there)
