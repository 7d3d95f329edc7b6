"""How fast a job is against a bare loop, Accelerate, transformers' Trainer and TRL, and against the floor.

    python benchmarks/compare.py [--quick | --tiny] [--check] [--only PART,PART] [--out FOLDER] [--data FOLDER]
        [--seed N]

`--quick` takes about 8 minutes on two idle cores; `--check` exits with 1 where a threshold is missed by more than the
measured spread, or could not be measured. `--tiny` runs every path of the code on the smallest models: its figures say
nothing, and its exit code is 1 where anything could not be measured. A part is `steps`, one of its workloads
(lognormal, gsm8k, fixed, tiny, vocabulary, lora; in the full run text, too), startup, strategies, saving, evaluation or
growth. Every threshold, and how to read the table: benchmarks/README.md.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from rich.console import Console

from finetune.errors import FinetuneError

from comparison import evaluation, growth, report, saving, startup, steps, strategies
from comparison.controller import CompetitorFailed
from comparison.results import Part, PartResults
from comparison.workloads import Form, workloads


def parts(options: argparse.Namespace) -> Mapping[str, Part]:
    """Return everything that is measured, in order."""
    chosen = [name for name in only(options) if name in names_of_workloads(options)]
    return {
        "steps": partial(steps.measure, data=options.data, seed=options.seed, only=chosen),
        "startup": startup.measure,
        "strategies": strategies.measure,
        "saving": saving.measure,
        "evaluation": partial(evaluation.measure, data=options.data),
        "growth": growth.measure,
    }


def main() -> int:
    """Measure, print the tables, and return 1 where `--check` fails."""
    options, console, started = _options(), Console(width=170), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, which leaves no process behind
    measured: dict[str, PartResults] = {}
    for name, part in chosen_parts(options).items():
        began = time.monotonic()
        try:
            folder = options.out / name
            folder.mkdir(parents=True, exist_ok=True)
            measured[name] = part(folder, form=options.form, log=partial(console.print, markup=False))
        except steps.LossesDiffer as error:
            console.print(f"error: {error}", markup=False)
            return 1
        except (
            CompetitorFailed,
            FinetuneError,
            OSError,
            subprocess.SubprocessError,
        ) as error:  # the other parts continue
            measured[name] = PartResults(missing=[f"{name}: {error}"])
        console.print(f"{name}: {time.monotonic() - began:.0f} s")
    _report(measured, options, console, seconds=time.monotonic() - started)
    failures = report.failures(measured)
    for line in failures if options.check else ():
        console.print(f"check: {line}", markup=False)
    if options.form is Form.TINY:
        return 1 if report.missing(measured) else 0
    return 1 if options.check and failures else 0


def chosen_parts(options: argparse.Namespace) -> Mapping[str, Part]:
    """Return the parts that `--only` names; ends the program where it names an unknown one."""
    there, wanted = parts(options), set(only(options))
    unknown = wanted - set(there) - names_of_workloads(options)
    if unknown:
        sys.exit(
            f"error: --only {', '.join(sorted(unknown))}: there are {', '.join((*there, *names_of_workloads(options)))}"
        )
    if wanted & names_of_workloads(options):
        wanted.add("steps")
    return {name: part for name, part in there.items() if not wanted or name in wanted}


def only(options: argparse.Namespace) -> list[str]:
    """Return what `--only` names."""
    return [name for name in options.only.split(",") if name]


def names_of_workloads(options: argparse.Namespace) -> set[str]:
    """Return the workloads that `steps` is made of."""
    return {each.name for each in workloads(options.form)}


def _report(
    measured: Mapping[str, PartResults], options: argparse.Namespace, console: Console, *, seconds: float
) -> None:
    heading = report.heading(report.machine())
    report.show(measured, console)
    settings = {name: str(value) for name, value in vars(options).items()}
    report.write(measured, options.out / "results.json", options=settings, seconds=seconds)
    console.print(f"{heading}\n{seconds:.0f} s; {options.out / 'results.json'}", markup=False, highlight=False)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(form=Form.FULL)
    parser.add_argument("--quick", dest="form", action="store_const", const=Form.QUICK)
    parser.add_argument("--tiny", dest="form", action="store_const", const=Form.TINY, help="every path of the code")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", default="", help="parts to measure, with commas between them")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
