"""What is shown at the end: the tables, the thresholds, `results.json`."""

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

from comparison import results as shown
from comparison.results import PartResults, Result

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("torch", "transformers", "accelerate", "trl", "peft", "deepspeed", "datasets", "numpy"),
    *("triton", "flash_attn", "liger_kernel"),
)
COLOURS = {"met": "green", "within the spread": "yellow", "not reached": "cyan", "MISSED": "bold red"}


def show(parts: Mapping[str, PartResults], console: Console) -> None:
    """Print every table, then the results in the order of their topics."""
    for part in parts.values():
        for table in part.tables:
            _show_table(table, console)
    found = results(parts)
    thresholds = Table(
        "topic", "what", "measured (quartiles)", "threshold", "", title="Thresholds", box=box.SIMPLE_HEAD
    )
    for each in found:
        color = COLOURS[each.verdict]
        thresholds.add_row(
            str(each.topic), each.what, each.value_text, each.threshold_text, f"[{color}]{each.verdict}[/]"
        )
    console.print(thresholds)
    for number, note in enumerate(dict.fromkeys(each.note for each in found if each.note), start=1):
        concerned = ", ".join(sorted({each.what.split(":")[0] for each in found if each.note == note}))
        console.print(f"[{number}] {concerned}: {note}", markup=False, highlight=False)
    for line in missing(parts):
        console.print(f"not measured: {line}", markup=False)


def results(parts: Mapping[str, PartResults]) -> list[Result]:
    """Return all results in the order of their topics."""
    return sorted((each for part in parts.values() for each in part.results), key=lambda each: each.topic)


def missing(parts: Mapping[str, PartResults]) -> list[str]:
    """Return what could not be measured, and why."""
    return [line for part in parts.values() for line in part.missing]


def failures(parts: Mapping[str, PartResults]) -> list[str]:
    """Return why `--check` fails; nothing where all thresholds are met."""
    missed = [
        f"threshold missed: {each.what}: {each.value_text}, {each.threshold_text}"
        for each in results(parts)
        if each.is_missed
    ]
    return [*missed, *(f"not measured: {line}" for line in missing(parts))]


def write(parts: Mapping[str, PartResults], path: Path, *, options: Mapping[str, Any], seconds: float) -> None:
    """Write everything as JSON."""
    record = {
        "version": 2,
        "settings": {**options, "seconds": round(seconds, 1), **machine()},
        "results": [each.record() for each in results(parts)],
        "missing": missing(parts),
        "parts": {name: part.record for name, part in parts.items()},
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


def heading(facts: Mapping[str, Any]) -> str:
    """Return the machine in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    return (
        f"{facts['processor']}, {facts['cores']} cores; Python {facts['python']}, {versions}; commit {facts['commit']}"
    )


def _show_table(table: shown.Table, console: Console) -> None:
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
    described = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"
