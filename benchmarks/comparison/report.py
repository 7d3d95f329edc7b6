"""What is shown at the end: the tables, the thresholds, `results.json`."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from comparison.results import PartResults, Result, threshold_table

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("torch", "transformers", "accelerate", "trl", "peft", "deepspeed", "datasets", "numpy"),
    *("triton", "flash_attn", "liger_kernel"),
)


def show(parts: Mapping[str, PartResults]) -> None:
    """Print every table, then the results in the order of their topics."""
    found = results(parts)
    for table in (*(table for part in parts.values() for table in part.tables), threshold_table(found)):
        print(table.markdown())
    for number, note in enumerate(dict.fromkeys(each.note for each in found if each.note), start=1):
        concerned = ", ".join(sorted({each.what.split(":")[0] for each in found if each.note == note}))
        print(f"[{number}] {concerned}: {note}")
    for line in missing(parts):
        print(f"not measured: {line}")


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
