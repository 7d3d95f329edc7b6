"""Topic 4: two processes, against a DDP loop written by hand and against Trainer driving the same strategy."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from comparison.controller import Controller, StepCosts
from comparison.jobs import write_job
from comparison.results import Log, PartResults, Result, Spread
from comparison.steps import make
from comparison.workloads import Form, Sizes, Workload

STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")
NUM_PROCESSES = 2
TOLERANCE = 1e-4
"""Of a step's mean loss, relative: every strategy adds up in another order."""


@dataclass(frozen=True)
class Measured:
    """A strategy that has been measured."""

    strategy: str
    costs: Mapping[str, StepCosts]

    def speed(self, theirs: str) -> Spread:
        """Return CPU-seconds a step, theirs / ours: how many times as fast ours is."""
        return Spread.of_ratios(self.costs[theirs].seconds, self.costs["ours"].seconds)

    @property
    def loss_difference(self) -> float:
        """Return by how much losses differ at most between the competitors, relative."""
        columns = list(zip(*(costs.losses for costs in self.costs.values()), strict=True))
        return float(max((max(losses) - min(losses)) / min(losses) for losses in columns))


def measure(folder: Path, *, form: Form, log: Log) -> PartResults:
    """Return the speed under every strategy."""
    folder = folder.resolve()
    workload = Workload(
        *("two-processes", "two processes, fixed length", (), form.choose(30, 5, 1), "fixed"),
        *(Sizes(4096, 256, 688, 4), 128, 128, 8, 2),
    )
    make(folder, [workload], data=folder)
    write_job_of_two(folder / workload.name, workload)
    missing = [] if importlib.util.find_spec("deepspeed") else ["speed under ZeRO: deepspeed is not installed"]
    measured = []
    installed = STRATEGIES[:2] if missing else STRATEGIES
    chosen = form.choose(installed, installed, installed[-1:])
    with Controller(folder, num_processes=NUM_PROCESSES) as controller:
        controller.start(dict.fromkeys(name for strategy in chosen for name in competitors(strategy, form)))
        for strategy in chosen:
            costs = controller.measure(
                folder / workload.name,
                competitors(strategy, form),
                rounds=workload.rounds,
                warm_up=workload.warm_up,
                strategy=strategy,
            )
            measured.append(Measured(strategy, costs))
            log(summary(measured[-1]))
    lengths = (folder / workload.name / "lengths").read_text()
    record = {each.strategy: {name: costs.record() for name, costs in each.costs.items()} for each in measured}
    missing += [
        f"{each.strategy}: losses differ by {each.loss_difference:.1e}, which is too much to compare speeds"
        for each in measured
        if each.loss_difference > TOLERANCE
    ]
    return PartResults([result(each, lengths) for each in measured], [], record, missing)


def competitors(strategy: str, form: Form) -> tuple[str, ...]:
    """Return who takes part: Trainer's DDP has no threshold and is left out of the quick run."""
    if strategy != "ddp":
        return ("trainer", "ours")
    return ("bare", "trainer", "ours") if form is Form.FULL else ("bare", "ours")


def write_job_of_two(folder: Path, workload: Workload) -> Path:
    """Write the product's job for two processes and return its path; each takes one microbatch a step."""
    text = write_job(folder, workload).read_text()
    whole, share = f"microbatch_size: {workload.batch}", f"microbatch_size: {workload.batch // NUM_PROCESSES}"
    assert whole in text, text
    path = folder / "two-processes.yaml"
    path.write_text(text.replace(whole, share))
    return path


def result(measured: Measured, lengths: str) -> Result:
    """Return the strategy's speed beside its threshold."""
    what, theirs, threshold = f"{measured.strategy}: speed, ours / Trainer driving it", "trainer", 1.0
    if measured.strategy == "ddp":
        what, theirs, threshold = "ddp: speed, ours / hand-written DDP", "bare", 0.98
    note = f"CPU-seconds of both ranks; {lengths}"
    return Result(4, what, measured.speed(theirs), threshold, "higher", note=note)


def summary(measured: Measured) -> str:
    """Return the strategy in one line."""
    against = ", ".join(f"{measured.speed(name)} of {name}" for name in measured.costs if name != "ours")
    return f"{measured.strategy}: speed {against}; losses differ by {measured.loss_difference:.1e}"
