"""How fast one GPU trains: our jobs, a bare loop, transformers' Trainer and TRL on models of 0.6 to 8 billion weights.

    python benchmarks/gpu.py --prepare wheels       # where there is a network: the packages that the GPU machine lacks
    python benchmarks/gpu.py --part 1               # there: the most telling cases, in under 4 minutes; then 2 and 3
    python benchmarks/gpu.py --check                # all parts; exit code 1 where a threshold is missed
    python benchmarks/gpu.py --report               # judge what gpu-results/ holds; needs no GPU
    python benchmarks/gpu.py --tiny --device cpu    # every case on a tiny model, without a GPU

No network: models are built from their configs and drawn on the device. What a case has measured is written at once to
`--out`, and a later call with the same folder measures only what is missing or has failed there. Cases that do not fit
into the time are left out by name.
"""

import argparse
import fnmatch
import json
import os
import sys
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from comparison import report
from comparison.results import PartResults
from gpu_comparison import wheels
from gpu_comparison.cases import CASES, PART_SECONDS, Case
from gpu_comparison.judgment import error_of, judged, page, rates
from gpu_comparison.processes import Processes

STARTED = time.monotonic()
RESERVE_SECONDS = 5.0
TINY_SECONDS = 900.0
"""The time limit of a tiny case; there is none for all of them."""
OURS_NEEDS = ("pydantic", "ruamel.yaml")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # no import may initialize CUDA here: forked processes could not use it
}


def main() -> int:
    """Measure what fits into the time, print it and write it down."""
    options = _options()
    if options.prepare:
        wheels.collect(options.prepare, python=options.python, limit_mib=options.limit_mib)
        return 0
    cases = [case for case in CASES if _is_selected(case, options)]
    names, path = [case.name for case in cases], options.out / "gpu.json"
    if options.report:
        earlier = json.loads(path.read_text())
        machine, records = earlier["machine"], earlier["cases"]
    else:
        if lacking := [name for name in OURS_NEEDS if not _is_installed(name)]:
            print(
                f"not installed: {', '.join(lacking)}, which every case needs. See benchmarks/gpu.md.", file=sys.stderr
            )
            return 2
        machine, records = _measure(cases, options, path)
    found = judged(names, records, peak=machine["peak_flops"])
    (options.out / "gpu.md").write_text(page(report.heading(machine), found))
    report.show({"gpu": found})
    print(report.heading(machine))
    if options.tiny:
        print("These are tiny models: the numbers mean nothing.")
    absent = [case.name for case in cases if _uninstalled(case)]
    missing = [line for line in found.missing if not any(f"{name}: " in line for name in absent)]
    return int(options.check and (bool(missing) or any(result.is_missed for result in found.results)))


def _measure(cases: list[Case], options: argparse.Namespace, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the machine and the records of all cases, which are in the file after each case."""
    os.environ.update(ENVIRONMENT)
    roots = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*roots, os.environ.get("PYTHONPATH"))))
    sys.path[:0] = roots[:1]
    measuring = import_module("gpu_comparison.measure")  # imports torch
    measuring.import_competitors()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-benchmark-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        settings = measuring.Settings(options.device, folder, options.tiny)
        processes = Processes(folder)
        machine = processes.run(measuring.describe_machine, options.device, timeout_seconds=60)
        if "error" in machine:
            sys.exit(f"the device cannot be used: {machine['error']}")
        if options.peak_tflops:
            machine["peak_flops"] = options.peak_tflops * 1e12
        records = _measured_before(path, machine)
        limit = options.budget_seconds or PART_SECONDS * len({case.part for case in cases})
        for case in cases:
            if error_of(records, case.name) is None:
                continue
            left = TINY_SECONDS if options.tiny else STARTED + limit - time.monotonic() - RESERVE_SECONDS
            if reason := _reason_to_leave_out(case, left=left, is_tiny=options.tiny):
                records[case.name] = {"error": f"left out: {reason}"}
                continue
            started = time.monotonic()
            record = processes.run(measuring.measure, case, settings, timeout_seconds=left)
            records[case.name] = {**record, "case_seconds": time.monotonic() - started}
            _write(path, machine, judged([case.name for case in cases], records, peak=machine["peak_flops"]))
            outcome = record.get("error") or f"{median(rates(record)):,.0f} tokens/s"
            print(f"{case.name}: {outcome}  [{time.monotonic() - STARTED:.0f} s]", flush=True)
    _write(path, machine, judged([case.name for case in cases], records, peak=machine["peak_flops"]))
    return machine, records


def _measured_before(path: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """Return the records of the file; exits if they are of another machine."""
    if not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    differing = [key for key in ("processor", "versions") if earlier["machine"][key] != machine[key]]
    if differing:
        sys.exit(f"{path} was measured elsewhere: {', '.join(differing)} differ. Give another folder to --out.")
    records: dict[str, Any] = earlier["cases"]
    return records


def _write(path: Path, machine: dict[str, Any], found: PartResults) -> None:
    results = [result.record() for result in found.results]
    whole = {"machine": machine, "results": results, "missing": found.missing, "cases": found.record}
    partial = path.with_name(".gpu.json")
    partial.write_text(json.dumps(whole, indent=1))
    partial.replace(path)


def _is_selected(case: Case, options: argparse.Namespace) -> bool:
    return case.part in options.part and any(fnmatch.fnmatch(case.name, pattern) for pattern in options.only)


def _reason_to_leave_out(case: Case, *, left: float, is_tiny: bool) -> str | None:
    if lacking := _uninstalled(case):
        return f"not installed: {', '.join(lacking)}"
    if not is_tiny and left < case.seconds:
        return f"{max(0.0, left):.0f} s are left and it takes about {case.seconds:.0f}"
    return None


def _uninstalled(case: Case) -> list[str]:
    return [name for name in case.variant.packages if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is not there either
        return False


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", default=["*"], help="cases whose name fits one of these patterns: '1B*'")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of gpu.json and gpu.md")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a threshold is missed or not measured")
    parser.add_argument("--report", action="store_true", help="measure nothing: judge what the folder holds")
    parser.add_argument("--budget-seconds", type=float, help=f"time limit; {PART_SECONDS:.0f} for each part if unset")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak of a GPU that is not in our table")
    parser.add_argument("--tiny", action="store_true", help="the same code on models that a CPU can train")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="collect wheels here instead")
    parser.add_argument("--python", default="3.12", help="with --prepare: the GPU machine's version")
    parser.add_argument("--limit-mib", type=float, default=64, help="with --prepare: size of the folder at most")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
