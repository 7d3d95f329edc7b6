"""Topic 6, evaluation: the product's evaluator against Trainer's on documents of varying length."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from comparison.controller import run_script
from comparison.results import Log, PartResults, Result, Spread, Table
from comparison.steps import make
from comparison.workloads import SMALL, TINY, Form, Sizes, Workload

BATCH = 8
TOLERANCE = 1e-5
"""Of the mean loss over all documents, relative."""


def measure(folder: Path, *, form: Form, log: Log, data: Path) -> PartResults:
    """Return the speed of evaluation, on lognormal lengths and, in the full run, on GSM8K."""
    folder = folder.resolve()
    chosen = _workloads(form)
    make(folder, chosen, data=data, seed=0)
    results: list[Result] = []
    rows: list[Sequence[str]] = []
    record: dict[str, Any] = {}
    missing: list[str] = []
    for workload in chosen:
        figures = run_script("comparison.evaluation_worker", folder / workload.name, form.choose(15, 2, 1))
        ours, bare = figures["losses"]["ours"], figures["losses"]["bare"]
        if abs(ours - bare) > TOLERANCE * bare:
            missing.append(f"evaluation: {workload.name}: the loss is {ours}, by hand it is {bare}")
        lengths = (folder / workload.name / "lengths").read_text()
        ratio = Spread.of_ratios(figures["seconds"]["trainer"], figures["seconds"]["ours"])
        what = f"evaluation, {workload.name}: non-pad tokens per CPU-second, ours / Trainer"
        results.append(Result(6, what, ratio, 1.5, "higher", note=f"microbatches of {BATCH}; {lengths}"))
        rows += _rows(workload, figures)
        record[workload.name] = figures
        log(f"{what}: {ratio}")
    header = ("workload", "competitor", "non-pad tokens/s", "speed, ours / theirs", "mean loss")
    table = Table("Evaluation", header, rows, f"microbatches of {BATCH}, one thread")
    return PartResults(results, [table], record, missing)


def _workloads(form: Form) -> list[Workload]:
    sizes, batches = form.choose((Sizes(), 12), (SMALL, 6), (TINY, 6))
    both = (
        Workload("lognormal", "lengths lognormal, answers count", (), 1, kind="lognormal"),
        Workload("gsm8k", "GSM8K, answers count", (), 1, kind="gsm8k"),
    )
    chosen = both if form is Form.FULL else both[:1]
    return [replace(each, rounds=batches - 4, sizes=sizes, batch=BATCH, warm_up=3) for each in chosen]


def _rows(workload: Workload, figures: dict[str, Any]) -> Sequence[Sequence[str]]:
    seconds, losses, tokens = figures["seconds"], figures["losses"], figures["tokens"]
    return [
        (
            workload.name,
            name,
            f"{tokens / Spread.of(each).median:,.0f}",
            "" if name == "ours" else str(Spread.of_ratios(each, seconds["ours"])),
            f"{losses[name]:.6f}" if name in losses else "mean of means",
        )
        for name, each in seconds.items()
    ]
