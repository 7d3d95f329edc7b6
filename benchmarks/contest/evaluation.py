"""Gate 6, evaluation: the product's evaluator against Trainer's on documents of varying length."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from contest.controller import ROOT, ContestantDied, environment
from contest.finding import Finding, Spread
from contest.measured import Measured, Say, Table
from contest.steps import make
from contest.workloads import SMALL, Sizes, Workload

BATCH = 8
TOLERANCE = 1e-5
"""Of the mean loss over all documents, relative."""


def measure(folder: Path, *, is_quick: bool, say: Say, data: Path) -> Measured:
    """Return the gate of evaluation, on documents of which all is learnt and on GSM8K."""
    folder = folder.resolve()
    chosen = _workloads(is_quick=is_quick)
    make(folder, chosen, data=data, seed=0)
    findings: list[Finding] = []
    rows: list[Sequence[str]] = []
    record: dict[str, Any] = {}
    missing: list[str] = []
    for workload in chosen:
        figures = run_worker("evaluation_rounds.py", folder / workload.name, 2 if is_quick else 15)
        ours, bare = figures["losses"]["ours"], figures["losses"]["bare"]
        if abs(ours - bare) > TOLERANCE * bare:
            missing.append(f"gate 6, evaluation: {workload.name}: the loss is {ours}, by hand it is {bare}")
        note = (folder / workload.name / "note").read_text()
        ratio = Spread.of_ratios(figures["seconds"]["trainer"], figures["seconds"]["ours"])
        what = f"evaluation, {workload.name}: non-pad tokens per CPU-second, ours / Trainer"
        findings.append(Finding(6, what, ratio, 1.5, "higher", note=f"microbatches of {BATCH}; {note}"))
        rows += _rows(workload, figures)
        record[workload.name] = figures
        say(f"{what}: {ratio}")
    header = ("workload", "contestant", "non-pad tokens/s", "speed, ours / theirs", "mean loss")
    table = Table("Evaluation", header, rows, f"microbatches of {BATCH}, one thread")
    return Measured(findings, [table], record, missing)


def run_worker(script: str, *arguments: object, seconds: int = 900) -> dict[str, Any]:
    """Return the figures that the script has left in the folder, its first argument; raises ContestantDied."""
    folder = Path(str(arguments[0]))
    log = folder / f"{Path(script).stem}.log"
    with log.open("w") as stream:
        command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, arguments)]
        try:
            code: object = subprocess.run(
                command, stdout=stream, stderr=stream, env=environment(), cwd=ROOT, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"none within {seconds} s"
    if code != 0:
        raise ContestantDied(f"{script} ended with exit code {code}:\n{log.read_text()[-3000:]}")
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return figures


def _workloads(*, is_quick: bool) -> list[Workload]:
    sizes, batches = (SMALL, 6) if is_quick else (Sizes(), 12)
    there = (
        Workload("lognormal", "lengths lognormal, answers count", (), 1, kind="lognormal"),
        Workload("gsm8k", "GSM8K, answers count", (), 1, kind="gsm8k"),
    )
    chosen = there[:1] if is_quick else there
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
