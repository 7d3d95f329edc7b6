"""How fast a job is against a bare loop, Accelerate, transformers' Trainer and TRL.

    python benchmarks/compare.py [--quick | --tiny] [--check] [--only PART,PART] [--out FOLDER] [--data FOLDER]

`--quick` takes about 8 minutes on two idle cores; `--check` exits with 1 where a threshold is missed by more than the
measured spread, or could not be measured. `--tiny` runs every part once on the smallest models, in forks of one
process: its figures say nothing, and its exit code is 1 where anything could not be measured. A part is `steps`, one of
its workloads (lognormal, gsm8k, fixed, tiny), or `strategies`. Thresholds: benchmarks/README.md.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from finetune.errors import FinetuneError

from comparison import report, steps, strategies
from comparison.controller import CompetitorFailed, preload
from comparison.results import PartResults
from comparison.workloads import Form, workloads

log = partial(print, flush=True)


def main() -> int:
    """Measure, print the tables, and return 1 where `--check` fails."""
    options, started = _options(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, which leaves no process behind
    if options.form is Form.TINY:
        preload("comparison.competitors.peers", "comparison.competitors.ours", "comparison.make_workloads")
    measured: dict[str, PartResults] = {}
    for name, part in chosen_parts(options).items():
        began = time.monotonic()
        folder = options.out / name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            measured[name] = part(folder, form=options.form, log=log)
        except steps.LossesDiffer as error:
            log(f"error: {error}")
            return 1
        except (CompetitorFailed, FinetuneError, OSError, subprocess.SubprocessError) as error:
            measured[name] = PartResults(missing=[f"{name}: {error}"])  # the other parts continue
        log(f"{name}: {time.monotonic() - began:.0f} s")
    seconds, settings = time.monotonic() - started, {name: str(value) for name, value in vars(options).items()}
    report.show(measured)
    report.write(measured, options.out / "results.json", options=settings, seconds=seconds)
    log(f"{report.heading(report.machine())}\n{seconds:.0f} s; {options.out / 'results.json'}")
    failures = report.failures(measured)
    for line in failures if options.check else ():
        log(f"check: {line}")
    if options.form is Form.TINY:
        return 1 if report.missing(measured) else 0
    return 1 if options.check and failures else 0


def chosen_parts(options: argparse.Namespace) -> Mapping[str, Callable[..., PartResults]]:
    """Return the parts that `--only` names, or all; ends the program where it names an unknown one."""
    wanted = {name for name in options.only.split(",") if name}
    timed = {each.name for each in workloads(options.form)}
    parts: Mapping[str, Callable[..., PartResults]] = {
        "steps": partial(steps.measure, data=options.data, only=wanted & timed),
        "strategies": strategies.measure,
    }
    if unknown := wanted - set(parts) - timed:
        sys.exit(f"error: --only {', '.join(sorted(unknown))}: there are {', '.join((*parts, *timed))}")
    if wanted & timed:
        wanted.add("steps")
    return {name: part for name, part in parts.items() if not wanted or name in wanted}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(form=Form.FULL)
    parser.add_argument("--quick", dest="form", action="store_const", const=Form.QUICK)
    parser.add_argument("--tiny", dest="form", action="store_const", const=Form.TINY, help="every path of the code")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", default="", help="parts to measure, with commas between them")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
