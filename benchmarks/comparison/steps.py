"""The steps: first the losses are compared, then every workload is timed, all competitors taking turns."""

import importlib.util
import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from comparison.controller import Controller, run_script
from comparison.ratios import Measured, memory_results, results
from comparison.results import Log, PartResults
from comparison.step_tables import peak_summary, summary, tables
from comparison.workloads import EQUAL, Form, Workload, equivalence, memory, workloads


class LossesDiffer(Exception):
    """The competitors do not do the same maths: nothing is timed."""


def measure(folder: Path, *, form: Form, log: Log, data: Path, only: Collection[str] = ()) -> PartResults:
    """Return what topics 1 to 3 ask for; raises LossesDiffer where the competitors do not do the same maths."""
    folder = folder.resolve()
    chosen = [each for each in workloads(form) if not only or each.name in only]
    same, peak, *timed = [with_installed(each) for each in (equivalence(form), memory(form), *chosen)]
    log(f"making {len(timed) + 2} workloads")
    make(folder, [same, peak, *timed], data=data)
    with Controller(folder) as controller:
        peaks = run(controller, folder, peak, log=log, takes_turns=False)
        log(peak_summary(peaks))
        equal = run(controller, folder, same, log=log, takes_turns=False)
        require_equal_losses(equal)
        measured = [run(controller, folder, workload, log=log) for workload in timed]
    return collect(equal, peaks, measured, missing=not_installed())


def collect(equal: Measured, peaks: Measured, timed: Sequence[Measured], *, missing: Sequence[str]) -> PartResults:
    """Return all of it as results, tables and record."""
    found = [result for each in timed for result in results(each)] + memory_results(peaks)
    record = {
        each.workload.name: {
            "workload": each.workload.record(),
            "lengths": each.lengths,
            "competitors": {name: costs.record() for name, costs in each.costs.items()},
            "loss_differences": {
                name: each.loss_difference(name) for name in EQUAL if {name, "bare"} <= set(each.costs)
            },
        }
        for each in (equal, peaks, *timed)
    }
    return PartResults(found, tables(equal, peaks, timed), record, missing)


def make(folder: Path, chosen: Sequence[Workload], *, data: Path) -> None:
    """Make the folders of the workloads, in a process of its own."""
    spec = {"workloads": [each.record() for each in chosen], "data": str(data.resolve())}
    (folder / "workloads.json").write_text(json.dumps(spec))
    run_script("comparison.make_workloads", folder)


def run(controller: Controller, folder: Path, workload: Workload, *, log: Log, takes_turns: bool = True) -> Measured:
    """Return what everybody's steps cost on the workload."""
    controller.start(workload.competitors)
    lengths = (folder / workload.name / "lengths").read_text()
    log(f"{workload.name}: {workload.title}; {lengths}")
    costs = controller.measure(
        folder / workload.name,
        workload.competitors,
        rounds=workload.rounds,
        warm_up=workload.warm_up,
        takes_turns=takes_turns,
    )
    measured = Measured(workload, lengths, costs)
    if takes_turns:
        log(summary(measured))
    return measured


def require_equal_losses(measured: Measured) -> None:
    """Raise LossesDiffer for those whose losses differ from the bare loop's."""
    differing = measured.differing()
    if differing:
        named = ", ".join(f"{name} by {most:.1e}" for name, most in differing.items())
        raise LossesDiffer(
            f"the losses of the first {measured.workload.rounds} steps differ from the bare loop's: {named}. "
            "Competitors that compute something else cannot be compared; nothing was timed."
        )


def not_installed() -> list[str]:
    """Return what cannot be measured here, and why."""
    if importlib.util.find_spec("trl") is not None:
        return []
    return ["speed and memory against TRL: trl is not installed. Install it with: pip install -e '.[benchmark]'"]


def with_installed(workload: Workload) -> Workload:
    """Return the workload with those competitors that are installed."""
    if not not_installed():
        return workload
    present = tuple(name for name in workload.competitors if not name.startswith("trl"))
    return replace(workload, competitors=present)
