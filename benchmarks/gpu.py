"""How fast one GPU trains: our jobs, a bare loop, transformers' Trainer and TRL on models of 0.6 to 8 billion weights.

    python benchmarks/gpu.py --check                     # what has a threshold first, within 480 s
    python benchmarks/gpu.py --only '8B*' --out one      # a part ...
    python benchmarks/gpu.py --merge one/gpu.json        # ... and the rest, judged together
    python benchmarks/gpu.py --tiny --device cpu         # every path of the code, on tiny models, without a GPU

No network: models are built from their configs and drawn on the device. Each case has a process of its own; what it has
measured is written at once, and a case that fails is recorded with its reason. The most important cases come first;
those that do not fit into the budget are left out by name.
"""

import argparse
import fnmatch
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from comparison import report
from comparison.results import PartResults
from gpu_comparison import workers
from gpu_comparison.cases import OURS_NEEDS, Case, cases, one_of_each
from gpu_comparison.rates import error_of, rates
from gpu_comparison.results import measured, page
from gpu_comparison.shapes import peak_flops

RESERVE_SECONDS = 5.0
TINY_SECONDS = 300.0
"""How long a tiny case may take; there is no budget for all of them."""
WHEELS = "`python benchmarks/wheels.py` collects the wheels where there is a network; see benchmarks/README.md"


def main() -> int:
    """Measure what fits into the budget, print it and write it down."""
    options = _options()
    wanted = _wanted(options)
    absent = _absent(wanted)
    if essential := [name for name in absent if name in OURS_NEEDS]:
        print(f"missing here: {', '.join(essential)}, without which none of our cases runs. {WHEELS}.", file=sys.stderr)
        return 2
    if absent:
        lacking = (f"{name} ({', '.join(needing)})" for name, needing in absent.items())
        print(f"not installed, so these cases are left out: {'; '.join(lacking)}. {WHEELS}.", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    machine, records = _merged(options)
    peak = options.peak_tflops * 1e12 if options.peak_tflops else peak_flops(machine["processor"])
    found = measured(wanted, records, peak=peak, is_tiny=options.tiny)
    with (
        tempfile.TemporaryDirectory(prefix="gpu-benchmark-", ignore_cleanup_errors=True) as work,
        workers.alive(workers.Settings(Path(work), options.device, options.tiny)) as all_,
    ):
        for _ in _run(wanted, records, all_, options):
            found = measured(wanted, records, peak=peak, is_tiny=options.tiny)
            _write(options.out, machine, found)
    found = measured(wanted, records, peak=peak, is_tiny=options.tiny)
    _write(options.out, machine, found)
    text = page(report.heading(machine), wanted, records, found=found, peak=peak, is_tiny=options.tiny)
    (options.out / "gpu.md").write_text(text)
    report.show({"gpu": found})
    print(report.heading(machine))
    if options.tiny:
        print("These are tiny models: the numbers mean nothing.")
    not_asked = {case.name for case in wanted if any(name in absent for name in case.required)}
    missing = [line for line in found.missing if not any(f"{name}: " in line for name in not_asked)]
    return int(options.check and (bool(missing) or any(each.is_missed for each in found.results)))


def _run(
    wanted: Sequence[Case], records: dict[str, Any], alive: workers.Workers, options: argparse.Namespace
) -> Iterator[None]:
    """Measure the cases that have not been yet, as long as there is time; yield after each."""
    ended = time.monotonic() + options.budget_seconds
    remaining = [case for case in wanted if error_of(records, case.name) is not None]
    for number, case in enumerate(remaining):
        left = TINY_SECONDS if options.tiny else ended - time.monotonic() - RESERVE_SECONDS
        if reason := _reason_to_leave_out(case, left=left, is_tiny=options.tiny):
            records[case.name] = {"error": f"left out: {reason}"}
            continue
        following = next((each for each in remaining[number + 1 :] if not _uninstalled(each)), None)
        records[case.name] = record = alive.run(case, then=following, timeout_seconds=left)
        print(f"{case.name}: {_outcome(record)}  [{ended - time.monotonic():.0f} s left]", flush=True)
        yield


def _reason_to_leave_out(case: Case, *, left: float, is_tiny: bool) -> str | None:
    if lacking := _uninstalled(case):
        return f"not installed: {', '.join(lacking)}"
    if not is_tiny and left < case.seconds:
        return f"{max(0.0, left):.0f} s are left and it takes about {case.seconds:.0f}"
    return None


def _outcome(record: dict[str, Any]) -> str:
    if "error" in record:
        return str(record["error"])
    return f"{median(rates(record)):,.0f} tokens/s"


def _wanted(options: argparse.Namespace) -> list[Case]:
    if options.tiny and not options.only:
        return one_of_each()
    return [case for case in cases() if any(fnmatch.fnmatch(case.name, each) for each in options.only or ["*"])]


def _uninstalled(case: Case) -> list[str]:
    return [name for name in case.required if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is not there either
        return False


def _absent(wanted: Sequence[Case]) -> dict[str, list[str]]:
    """Return the packages that are not installed, each with the cases that need it."""
    absent: dict[str, list[str]] = {}
    for case in wanted:
        for name in _uninstalled(case):
            absent.setdefault(name, []).append(case.name)
    return absent


def _merged(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the machine, and what earlier calls have measured on it; exits where that was another machine."""
    earlier = [json.loads(path.read_text()) for path in options.merge]
    has_device = options.device == "cpu" or torch.cuda.is_available()
    machine = _machine(options.device) if has_device else earlier[0]["machine"]
    for each, path in zip(earlier, options.merge, strict=True):
        differing = [key for key in ("processor", "versions") if each["machine"][key] != machine[key]]
        if differing:
            sys.exit(f"{path} was measured elsewhere: {', '.join(differing)} differ, so figures are not comparable.")
    records: dict[str, Any] = {}
    for each in earlier:
        records |= {name: record for name, record in each["cases"].items() if error_of(each["cases"], name) is None}
    return machine, records


def _machine(device: str) -> dict[str, Any]:
    facts = report.machine()
    if device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        facts |= {"processor": f"{torch.cuda.get_device_name(0)}, {memory:.0f} GiB", "cuda": torch.version.cuda}
    return facts


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


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-seconds", type=float, default=480.0, help="0 measures nothing: for `--merge`")
    parser.add_argument("--only", nargs="+", help="cases whose name fits one of these patterns, such as '1B*'")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="gets gpu.json and gpu.md")
    parser.add_argument(
        "--merge", type=Path, nargs="+", default=[], help="gpu.json of earlier calls: not measured again"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak, for a device that is not in our table")
    parser.add_argument("--tiny", action="store_true", help="the same code on models that a CPU can train")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a threshold is missed or not measured")
    options = parser.parse_args()
    only_merges = options.merge and options.budget_seconds == 0
    if options.device == "cuda" and not torch.cuda.is_available() and not only_merges:
        parser.error("there is no CUDA device. `--tiny --device cpu` runs the code without one.")
    return options


if __name__ == "__main__":
    sys.exit(main())
