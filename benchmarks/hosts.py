"""Runs on hosts of a Ray cluster that come and go, against the undisturbed run: makes experiments/hosts.md.

    python benchmarks/hosts.py [--only NAME] [--at-once 2]      # needs root and the extra `ray`

Runs the tests of `tests/launch/test_hosts_*.py`, and writes the table of what became of each run. Rows of other runs
stay: those that `--only` (an expression of `pytest -k`) leaves out, and those of the supervisors that were there before
Ray. Exit code 1 unless all pass.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "experiments" / "hosts.md"
HEADER = (
    "| run | engine | strategy | hosts x ranks | what happened | attempts on hosts | steps taken again | seconds lost "
    "| median step | largest difference of a loss |\n|---|---|---|---|---|---|---|---|---|---|\n"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--results", type=Path, help="lines of an earlier run, to make the table without running")
    options = parser.parse_args()
    if options.results is not None:
        write_page(read_lines(options.results))
        return 0
    with tempfile.TemporaryDirectory() as name:
        results = Path(name) / "results.jsonl"
        words = ["-m", "slow", "-n", str(options.at_once), *(["-k", options.only] if options.only else [])]
        tests = [str(path) for path in sorted((ROOT / "tests" / "launch").glob("test_hosts_*.py"))]
        command = [sys.executable, "-m", "pytest", *tests, *words]
        code = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "FINETUNE_HOSTS_RESULTS": str(results)}, check=False
        ).returncode
        write_page(read_lines(results) if results.exists() else [])
    return code


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_page(found: list[dict]) -> None:
    """Write the rows into the page's table, in place of those of the same runs."""
    text = PAGE.read_text() if PAGE.exists() else f"# Hosts that come and go\n\n{HEADER}"
    lines = [*re.findall(r"^\| (?!run ).*\|$", text, re.MULTILINE), *map(format_row, found)]
    rows = {tuple(cell.strip() for cell in line.split("|")[1:3]): line for line in lines}
    order = [name for name, _ in rows]  # both engines of a run next to each other
    before, after = text.split(HEADER)
    rest = after.split("\n\n", 1)[1:] if "\n\n" in after else []
    table = [rows[key] for key in sorted(rows, key=lambda key: (order.index(key[0]), key[1]))]
    PAGE.write_text(before + HEADER + "\n".join(table) + "\n" + "".join("\n" + each for each in rest))


def format_row(each: dict) -> str:
    cells = [
        *(each["name"], "Ray", each["strategy"], each["hosts"], each["happened"], " → ".join(each["attempts"])),
        *(str(each["steps_again"]), f"{each['seconds_lost']:.0f}", f"{each['median_step_seconds']:.2f} s"),
        f"{each['largest_difference']:.0e}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
