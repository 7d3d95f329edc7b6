"""How fast a job is against a bare loop, Accelerate, transformers' Trainer and TRL, gate by gate.

    python benchmarks/compare.py [--quick] [--check] [--only PART,PART] [--out FOLDER] [--data FOLDER] [--seed N]

`--quick` ends within 8 minutes on two idle cores; `--check` exits with 1 where a gate is missed by more than the
measured spread, or could not be measured. Every gate and how to read the table: benchmarks/README.md.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from contest.measured import Measured, Part


def parts(options: argparse.Namespace) -> Mapping[str, Part]:
    """Return everything that is measured, in order."""
    return {
        # "startup": startup.measure,
        # "strategies": strategies.measure,
        # "saving": saving.measure,
        # "evaluation": evaluation.measure,
        # "flatness": flatness.measure,
    }


def main() -> int:
    """Measure, print the tables and the gates, and return 1 where `--check` fails."""
    options = _options()
    measured: dict[str, Measured] = {}
    for name, part in parts(options).items():
        if not options.only or name in options.only.split(","):
            folder = options.out / name
            folder.mkdir(parents=True, exist_ok=True)
            measured[name] = part(folder, is_quick=options.quick, say=Console().print)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", help="parts to measure, with commas between them")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
