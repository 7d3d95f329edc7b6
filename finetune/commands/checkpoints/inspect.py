"""`finetune checkpoint ls`, `show` and `verify`: a run's checkpoints as tables or JSON, and their integrity."""

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

    File sizes are compared and the JSON files are read; with `verifies`, every file is read and hashed.
    """
    location = locate_run(run)
    checkpoints = [_checked(entry, read_all=verifies) for entry in read_entries(location.checkpoints)]
    leftovers = find_leftovers(location.checkpoints)
    if as_json:
        rest = [{"path": str(left.path), "size_bytes": left.size_bytes, "meaning": left.meaning} for left in leftovers]
        print_json(
            {
                "folder": str(location.checkpoints),
                "checked": "digests" if verifies else "sizes",
                "checkpoints": [_facts(checkpoint) for checkpoint in checkpoints],
                "leftovers": rest,
            }
        )
        return
    if not checkpoints:
        print(f"{location.checkpoints} has no checkpoints.")
    else:
        print_table(checkpoints_table(checkpoints, now=time.time(), width=width()))
    for line in checkpoints_notes(checkpoints, leftovers, verifies=verifies):
        print(line)


def show_checkpoint(run: Path, *, step: int | None, as_json: bool) -> None:
    """Print all facts about one checkpoint: of the step, the newest, or the given folder."""
    checkpoint = _checked(read_entry(select_checkpoint(locate_run(run), step=step)), read_all=False)
    if as_json:
        print_json(_facts(checkpoint) | _contents(checkpoint.entry))
        return
    print_facts(checkpoint_facts(checkpoint, counts=count_tensors(checkpoint.entry), now=time.time()))


def verify_checkpoints(run: Path, *, step: int | None) -> bool:
    """Read and hash one checkpoint or all, print whether each is good, and return whether all are.

    For a bad checkpoint, prints the bad files and the damaged tensors in them.
    """
    location = locate_run(run)
    are_good = [_verify(path) for path in _selected(location, step=step)]
    return all(are_good)


def _selected(location: RunLocation, *, step: int | None) -> Sequence[Path]:
    """Return the checkpoint given by step or folder, else all; raises CheckpointError if there is none."""
    newest = select_checkpoint(location, step=step)
    if location.chosen is not None or step is not None:
        return [newest]
    return [entry.path for entry in read_entries(location.checkpoints)]


def _verify(path: Path) -> bool:
    checkpoint = _checked(read_entry(path), read_all=True)
    manifest = checkpoint.entry.manifest
    if checkpoint.is_good and manifest is not None:
        print(f"{path.name}: good, {len(manifest.files)} files, {format_size(manifest.size_bytes)} read", flush=True)
        return True
    print(f"{path.name}: BAD", flush=True)
    damaged = {file.problem: file.tensors for file in checkpoint.bad_files}
    for problem in checkpoint.problems:
        print(f"  {problem}")
        if tensors := damaged.get(problem):
            print(f"    damaged: {_listed(tensors)}")
    return False


def _checked(entry: CheckpointEntry, *, read_all: bool) -> CheckedCheckpoint:
    return CheckedCheckpoint(entry, *find_problems(entry, read_all=read_all))


def _facts(checkpoint: CheckedCheckpoint) -> dict[str, Any]:
    manifest = checkpoint.entry.manifest
    known = {"step": checkpoint.entry.step, "path": str(checkpoint.entry.path)}
    if manifest is not None:
        known |= {
            "size_bytes": manifest.size_bytes,
            "created": manifest.created,
            "metrics": dict(manifest.metrics),
            "origin": dict(manifest.run.origin),
            "state_sha256": manifest.state_sha256,
        }
    return known | {"is_good": checkpoint.is_good, "problems": list(checkpoint.problems)}


def _contents(entry: CheckpointEntry) -> dict[str, Any]:
    manifest = entry.manifest
    if manifest is None:
        return {}
    files = {name: {"size_bytes": file.size_bytes, "sha256": file.sha256} for name, file in manifest.files.items()}
    counts = [
        {"kind": count.kind, "tensors": count.num_tensors, "numbers": count.num_elements, "dtypes": list(count.dtypes)}
        for count in count_tensors(entry)
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
