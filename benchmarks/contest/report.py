"""What is shown at the end: the tables, the gates, `results.json`."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from contest import measured
from contest.finding import Finding
from contest.measured import Measured

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "deepspeed", "datasets", "numpy")
COLOURS = {"met": "green", "within the spread": "yellow", "not reached": "cyan", "MISSED": "bold red"}


def show(all_measured: Mapping[str, Measured], console: Console) -> None:
    """Print every table, then the gates in order."""
    for part in all_measured.values():
        for table in part.tables:
            _show_table(table, console)
    found = findings(all_measured)
    gates = Table("gate", "what", "measured (quartiles)", "limit", "", title="Gates", box=box.SIMPLE_HEAD)
    for each in found:
        colour = COLOURS[each.verdict]
        gates.add_row(str(each.gate), each.what, measured_text(each), limit_text(each), f"[{colour}]{each.verdict}[/]")
    console.print(gates)
    for number, note in enumerate(dict.fromkeys(each.note for each in found if each.note), start=1):
        concerned = ", ".join(sorted({each.what.split(":")[0] for each in found if each.note == note}))
        console.print(f"[{number}] {concerned}: {note}", markup=False, highlight=False)
    for line in missing(all_measured):
        console.print(f"not measured: {line}", markup=False)


def findings(all_measured: Mapping[str, Measured]) -> list[Finding]:
    """Return all findings by the number of their gate."""
    return sorted((each for part in all_measured.values() for each in part.findings), key=lambda each: each.gate)


def missing(all_measured: Mapping[str, Measured]) -> list[str]:
    """Return what could not be measured, and why."""
    return [line for part in all_measured.values() for line in part.missing]


def failures(all_measured: Mapping[str, Measured]) -> list[str]:
    """Return why `--check` fails; nothing where all gates hold."""
    missed = [
        f"gate {each.gate} is missed: {each.what}: {measured_text(each)}, limit {limit_text(each)}"
        for each in findings(all_measured)
        if each.is_missed
    ]
    return [*missed, *(f"not measured: {line}" for line in missing(all_measured))]


def measured_text(found: Finding) -> str:
    """Return the median with its quartiles and unit."""
    unit = f" {found.unit}" if found.unit else ""
    return f"{found.spread}{unit}"


def limit_text(found: Finding) -> str:
    """Return the limit as it is to be read, an aim named as such."""
    sign = "at most" if found.better == "lower" else "at least"
    return f"{'aim: ' if found.is_aim else ''}{sign} {found.limit:g}{f' {found.unit}' if found.unit else ''}"


def write(all_measured: Mapping[str, Measured], path: Path, *, options: Mapping[str, Any], seconds: float) -> None:
    """Write everything as JSON."""
    record = {
        "version": 1,
        "settings": {**options, "seconds": round(seconds, 1), **machine()},
        "findings": [each.record() for each in findings(all_measured)],
        "missing": missing(all_measured),
        "parts": {name: part.record for name, part in all_measured.items()},
    }
    path.write_text(json.dumps(record, indent=1, default=str) + "\n")


def machine() -> dict[str, Any]:
    """Return where this runs: processor, cores, versions, the commit."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def heading(told: Mapping[str, Any]) -> str:
    """Return the machine in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items() if version)
    return f"{told['processor']}, {told['cores']} cores; Python {told['python']}, {versions}; commit {told['commit']}"


def _show_table(table: measured.Table, console: Console) -> None:
    shown = Table(title=table.title, box=box.SIMPLE_HEAD)
    for number, name in enumerate(table.header):
        is_number = number > 0 and all(_is_number(row[number]) for row in table.rows)
        shown.add_column(name, justify="right" if is_number else "left")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)
    if table.note:
        console.print(table.note, markup=False, highlight=False)
        console.print()


def _is_number(text: str) -> bool:
    return not text or text[0] in "+-0123456789"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    told = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return told.stdout.strip() or "unknown"
