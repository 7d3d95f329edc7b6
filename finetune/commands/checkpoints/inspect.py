"""`finetune checkpoint ls`, `show` and `verify`: a run's checkpoints as tables or JSON, and whether they are good."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.checkpoint.read.inventory import (
    CheckpointEntry,
    RunLocation,
    count_tensors,
    find_leftovers,
    find_problems,
    locate_run,
    read_entries,
    read_entry,
    select_checkpoint,
)
from finetune.commands.checkpoints.tables import (
    CheckedCheckpoint,
    checkpoint_facts,
    checkpoints_notes,
    checkpoints_table,
)
from finetune.commands.printing import print_facts, print_json, print_table, width
from finetune.runtime.resources import format_size

_MAX_LISTED = 4


def list_checkpoints(run: Path, *, verifies: bool, as_json: bool) -> None:
    """Print all checkpoints of the run, oldest first, and leftovers next to them.

    Of each, file sizes are compared and the JSON files are read; with `verifies`, every file is read and digested.
    """
    location = locate_run(run)
    found = [_checked(entry, read_all=verifies) for entry in read_entries(location.checkpoints)]
    leftovers = find_leftovers(location.checkpoints)
    if as_json:
        rest = [{"path": str(left.path), "size_bytes": left.size_bytes, "meaning": left.meaning} for left in leftovers]
        print_json(
            {
                "folder": str(location.checkpoints),
                "checked": "digests" if verifies else "sizes",
                "checkpoints": [_facts(each) for each in found],
                "leftovers": rest,
            }
        )
        return
    if not found:
        print(f"{location.checkpoints}: has no checkpoints.")
    else:
        print_table(checkpoints_table(found, now=time.time(), width=width()))
    for line in checkpoints_notes(found, leftovers, verifies=verifies):
        print(line)


def show_checkpoint(run: Path, *, step: int | None, as_json: bool) -> None:
    """Print everything about one checkpoint: that of the step, the newest, or the folder that was given."""
    found = _checked(read_entry(select_checkpoint(locate_run(run), step=step)), read_all=False)
    if as_json:
        print_json(_facts(found) | _contents(found.entry))
        return
    print_facts(checkpoint_facts(found, counts=count_tensors(found.entry), now=time.time()))


def verify_checkpoints(run: Path, *, step: int | None) -> bool:
    """Read and digest one checkpoint or all, print whether each is good, and return whether all are.

    For a bad one, prints each bad file and the damaged tensors in it.
    """
    location = locate_run(run)
    are_good = [_verify(path) for path in _selected(location, step=step)]
    return all(are_good)


def _selected(location: RunLocation, *, step: int | None) -> Sequence[Path]:
    """Return the one given by step or folder, else all; raises CheckpointError if there is none."""
    newest = select_checkpoint(location, step=step)
    if location.chosen is not None or step is not None:
        return [newest]
    return [entry.path for entry in read_entries(location.checkpoints)]


def _verify(path: Path) -> bool:
    found = _checked(read_entry(path), read_all=True)
    manifest = found.entry.manifest
    if found.is_good and manifest is not None:
        print(f"{path.name}: good, {len(manifest.files)} files, {format_size(manifest.size_bytes)} read", flush=True)
        return True
    print(f"{path.name}: BAD", flush=True)
    damaged = {file.problem: file.tensors for file in found.bad_files}
    for problem in found.problems:
        print(f"  {problem}")
        if tensors := damaged.get(problem):
            print(f"    damaged: {_listed(tensors)}")
    return False


def _checked(entry: CheckpointEntry, *, read_all: bool) -> CheckedCheckpoint:
    return CheckedCheckpoint(entry, *find_problems(entry, read_all=read_all))


def _facts(found: CheckedCheckpoint) -> dict[str, Any]:
    manifest = found.entry.manifest
    known = {"step": found.entry.step, "path": str(found.entry.path)}
    if manifest is not None:
        known |= {
            "size_bytes": manifest.size_bytes,
            "created": manifest.created,
            "metrics": dict(manifest.metrics),
            "origin": dict(manifest.run.origin),
            "state_sha256": manifest.state_sha256,
        }
    return known | {"is_good": found.is_good, "problems": list(found.problems)}


def _contents(entry: CheckpointEntry) -> dict[str, Any]:
    manifest = entry.manifest
    if manifest is None:
        return {}
    files = {name: {"size_bytes": each.size_bytes, "sha256": each.sha256} for name, each in manifest.files.items()}
    counts = [
        {"kind": each.kind, "tensors": each.num_tensors, "numbers": each.num_elements, "dtypes": list(each.dtypes)}
        for each in count_tensors(entry)
    ]
    return {
        "progress": dict(entry.progress),
        "identity": dict(manifest.run.identity),
        "settings": dict(manifest.run.settings),
        "versions": dict(manifest.versions),
        "format_version": manifest.format_version,
        "tensors": counts,
        "files": files,
    }


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
