"""How fast one GPU trains: our jobs, a bare loop, transformers' Trainer and TRL on models of 0.6 to 8 billion weights.

    python benchmarks/gpu.py [--budget-seconds 480] [--only PATTERN] [--out FOLDER] [--peak-tflops N] [--check]
    python benchmarks/gpu.py --tiny --device cpu     # every path of the code, on tiny models, without a GPU

No network, no weights on disk: models are built from their configs and drawn on the device. Each case has a process of
its own; what it has measured is written at once, and a case that fails is recorded with its reason. The most important
cases come first; those that do not fit into the budget are left out by name.
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from comparison import report
from comparison.results import PartResults
from gpu_comparison.cases import UNFINISHED, Case, cases, one_of_each
from gpu_comparison.results import measured
from gpu_comparison.shapes import peak_flops

ROOT = Path(__file__).parents[1]
RESERVE_SECONDS = 5.0


def main() -> int:
    """Measure what fits into the budget, print it and write it down."""
    options = _options()
    ended = time.monotonic() + options.budget_seconds
    options.out.mkdir(parents=True, exist_ok=True)
    machine = _machine(options.device)
    peak = options.peak_tflops * 1e12 if options.peak_tflops else peak_flops(machine["processor"])
    wanted = [case for case in cases() if fnmatch.fnmatch(case.name, options.only or "*")]
    if options.tiny and not options.only:
        wanted = one_of_each()
    records: dict[str, dict[str, Any]] = {}
    upcoming: Worker | None = None
    for number, case in enumerate(wanted):
        left = ended - time.monotonic() - RESERVE_SECONDS
        if not options.tiny and left < case.seconds:
            records[case.name] = {"error": f"left out: {left:.0f} s are left and it takes about {case.seconds:.0f}"}
            continue
        worker = upcoming if upcoming and upcoming.case is case else Worker(case, options)
        following = next((each for each in wanted[number + 1 :]), None)
        upcoming = Worker(following, options) if following else None  # it imports while this one computes
        records[case.name] = worker.result(timeout_seconds=left)
        outcome = records[case.name].get("error") or f"{_rate(records[case.name]):,.0f} tokens/s"
        print(f"{case.name}: {outcome}  [{ended - time.monotonic():.0f} s left]", flush=True)
        _write(options.out, machine, measured(wanted, records, peak=peak, is_tiny=options.tiny))
    if upcoming:
        upcoming.end()
    found = measured(wanted, records, peak=peak, is_tiny=options.tiny)
    _write(options.out, machine, found)
    _print(machine, found, is_tiny=options.tiny)
    return int(options.check and (bool(found.missing) or any(each.is_missed for each in found.results)))


class Worker:
    """The process of a case."""

    def __init__(self, case: Case, options: argparse.Namespace) -> None:
        self.case = case
        name = case.name.replace(" ", "-").replace(",", "")
        spec, self._log = options.out / f"{name}.json", options.out / f"{name}.log"
        folder = str((options.out / "work").resolve())
        spec.write_text(
            json.dumps({"case": case.record(), "folder": folder, "device": options.device, "tiny": options.tiny})
        )
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpu_comparison.worker", str(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_environment(),
            )

    def result(self, *, timeout_seconds: float) -> dict[str, Any]:
        """Let it go and return its record, or why there is none."""
        started = time.monotonic()
        try:
            out, _ = self._process.communicate("go\n", timeout=max(1.0, timeout_seconds))
        except subprocess.TimeoutExpired:
            self.end()
            return {"error": f"not done within {timeout_seconds:.0f} s"}
        lines = out.splitlines()
        if len(lines) < 2:
            return {"error": f"ended with exit code {self._process.returncode}: {self._last_line()}"}
        record: dict[str, Any] = json.loads(lines[-1])
        if record.get("error") == UNFINISHED:
            record["error"] += f" ({self._last_line()})"
        return {**record, "case_seconds": time.monotonic() - started}

    def _last_line(self) -> str:
        return next(reversed(self._log.read_text(errors="replace").strip().splitlines()), "it says nothing")

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")))
        ),
    }


def _machine(device: str) -> dict[str, Any]:
    facts = report.machine()
    if device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        facts |= {"processor": f"{torch.cuda.get_device_name(0)}, {memory:.0f} GiB", "cuda": torch.version.cuda}
    return facts


def _rate(record: dict[str, Any]) -> float:
    return float(sum(record["step_tokens"]) / sum(record["step_seconds"]))


def _write(folder: Path, machine: dict[str, Any], found: PartResults) -> None:
    whole = {
        "machine": machine,
        "results": [each.record() for each in found.results],
        "missing": list(found.missing),
        "cases": found.record,
    }
    partial = folder / ".gpu.json"
    partial.write_text(json.dumps(whole, indent=1))
    partial.replace(folder / "gpu.json")


def _print(machine: dict[str, Any], found: PartResults, *, is_tiny: bool) -> None:
    report.show({"gpu": found}, Console(width=190))
    print(report.heading(machine))
    if is_tiny:
        print("These are tiny models: the numbers mean nothing.")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-seconds", type=float, default=480.0)
    parser.add_argument("--only", help="cases whose name fits this pattern, such as '1B*'")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak, for a device that is not in our table")
    parser.add_argument("--tiny", action="store_true", help="the same code on models that a CPU can train")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a threshold is missed or not measured")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device. `--tiny --device cpu` runs the code without one.")
    return options


if __name__ == "__main__":
    sys.exit(main())
