"""Every task under every strategy: losses against one process, the final metric, and the export measured again.

    python benchmarks/task_matrix.py [--tasks sft,reward] [--strategies ddp,fsdp2,zero2,zero3]

Prints a table; exits 1 when a loss differs by more than 1e-4 relative, or an export gives another metric.
"""

import argparse
import math
import sys
import tempfile
from pathlib import Path

from task_cases import CASES
from task_cases.case import Case
from task_runs import Left, launch, prepare

STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")
TOLERANCE = 1e-4


def main() -> int:
    options = _options()
    cases = [case for case in CASES if not options.tasks or case.name in options.tasks.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(cases, folder)
        alone = launch(None, [(case, variant) for case in cases for variant in case.variants], folder)
        lines, num_failed = _rows("single", cases, alone, alone=alone, folder=folder)
        for strategy in options.strategies.split(","):
            runs = [(c, v) for c in cases for v in c.variants if (v, strategy) not in c.exempt]
            more, failed = _rows(strategy, cases, launch(strategy, runs, folder), alone=alone, folder=folder)
            lines, num_failed = lines + more, num_failed + failed
    print(f"{'task':<24}{'variant':<11}{'strategy':<8}{'loss differs':>14}{'metric':>34}{'export gives':>14}")
    print("\n".join(sorted(lines)))
    return 1 if num_failed else 0


def _rows(
    strategy: str,
    cases: list[Case],
    left: dict[tuple[str, str], Left],
    *,
    alone: dict[tuple[str, str], Left],
    folder: Path,
) -> tuple[list[str], int]:
    lines, num_failed = [], 0
    for case in cases:
        for variant in case.variants:
            if (variant, strategy) in case.exempt:
                lines.append(f"{case.name:<24}{variant:<11}{strategy:<8}  {case.exempt[variant, strategy]}")
                continue
            line, is_right = _row(case, left[case.name, variant], alone[case.name, variant], folder)
            lines.append(f"{case.name:<24}{variant:<11}{strategy:<8}{line}{'' if is_right else '  FAILED'}")
            num_failed += not is_right
    return lines, num_failed


def _row(case: Case, left: Left, alone: Left, folder: Path) -> tuple[str, bool]:
    if left.error is not None:
        return f"  {left.error.splitlines()[0]}", False
    difference = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(left.losses, alone.losses, strict=True))
    metric = left.metrics[case.metric]
    again = case.reload(left.final, folder / case.name)
    is_right = difference <= TOLERANCE and math.isclose(metric, again, rel_tol=TOLERANCE, abs_tol=1e-6)
    return f"{difference:>14.1e}{f'{case.metric} {metric:.5f}':>34}{again:>14.5f}", is_right


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="", help="only these, separated by commas")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
