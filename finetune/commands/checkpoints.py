"""`finetune checkpoint ls, show, verify, prune`: the checkpoints of a run, and which of them are kept."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from finetune.checkpoint.format.manifest import Manifest
from finetune.checkpoint.read.inventory import (
    CheckpointEntry,
    count_tensors,
    find_leftovers,
    find_problems,
    locate_run,
    read_entries,
    read_entry,
    select_checkpoint,
)
from finetune.checkpoint.write.retention import best_steps, delete_checkpoints, removable_steps
from finetune.commands.printing import print_facts, print_json, print_table, width
from finetune.config.load import RESOLVED_NAME, load_resolved
from finetune.config.sections.checkpoint import CheckpointSection, KeepBestSection
from finetune.errors import CheckpointError, UserError
from finetune.runtime.resources import format_size
from finetune.runtime.run_folder import lock_run_folder
from finetune.runtime.text.terminal import printable

ABSENT = "-"
UNUSED_VALUES = ("null", "written")
"""Values of unset keys, and of sections whose keys are also listed."""


@dataclass(frozen=True)
class CheckedCheckpoint:
    """A checkpoint with its problems."""

    entry: CheckpointEntry
    problems: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Return whether no problem was found."""
        return not self.problems


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
        table = _table("written by", "state")
        for checkpoint in checkpoints:
            state = Text("good", "green") if checkpoint.is_good else Text("BAD", "bold red")
            table.add_row(*_cells(checkpoint.entry), Text(printable(_origin(checkpoint.entry.manifest))), state)
        print_table(table)
    for checkpoint in checkpoints:
        for problem in checkpoint.problems:
            print(f"{checkpoint.entry.path.name}: {problem}")
    if checkpoints and not verifies:
        print("Only sizes were compared; `--verify` reads every file.")
    if leftovers:
        print("Leftovers, which no run resumes from:")
    for left in leftovers:
        print(f"  {left.path.name} ({format_size(left.size_bytes)}) {left.meaning}")


def show_checkpoint(run: Path, *, step: int | None) -> None:
    """Print all facts about one checkpoint: of the step, the newest, or the given folder."""
    print_facts(_details(_checked(read_entry(select_checkpoint(locate_run(run), step=step)), read_all=False)))


def verify_checkpoints(run: Path, *, step: int | None) -> bool:
    """Read and hash one checkpoint or all, print whether each is good or what its problems are; return if all are."""
    location = locate_run(run)
    paths = [select_checkpoint(location, step=step)]  # raises CheckpointError if there is none
    if location.chosen is None and step is None:
        paths = [entry.path for entry in read_entries(location.checkpoints)]
    are_good = True
    for path in paths:
        checkpoint = _checked(read_entry(path), read_all=True)
        manifest = checkpoint.entry.manifest
        if checkpoint.is_good and manifest is not None:
            size = format_size(manifest.size_bytes)
            print(f"{path.name}: good, {len(manifest.files)} files, {size} read", flush=True)
            continue
        are_good = False
        print(f"{path.name}: BAD", flush=True)
        for problem in checkpoint.problems:
            print(f"  {problem}")
    return are_good


def _details(checkpoint: CheckedCheckpoint) -> Iterator[tuple[str, str]]:
    """Yield the facts about one checkpoint, as names and texts."""
    entry, manifest = checkpoint.entry, checkpoint.entry.manifest
    yield "step", str(entry.step)
    yield "folder", str(entry.path)
    yield "state", "good (only sizes compared)" if checkpoint.is_good else "BAD"
    yield from (("", problem) for problem in checkpoint.problems)
    if manifest is None:
        return
    progress = entry.progress
    yield "state digest", manifest.state_sha256 or ABSENT
    yield "samples digest", str(progress.get("samples_sha256") or ABSENT)
    date = datetime.fromtimestamp(manifest.created, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
    yield "written", f"{date}, {age_text(time.time() - manifest.created)} ago, by {_origin(manifest)}"
    yield "metrics", _metrics(manifest.metrics)
    yield "progress", _progress(progress)
    for count in count_tensors(entry):
        tensors = f"{count.num_tensors} tensor{'' if count.num_tensors == 1 else 's'}"
        yield count.kind, f"{tensors}, {count.num_elements:,} elements, {', '.join(count.dtypes)}"
    yield "versions", ", ".join(f"{name} {number}" for name, number in manifest.versions.items())
    sizes = {name: f"{format_size(file.size_bytes)}, sha256 {file.sha256}" for name, file in manifest.files.items()}
    yield from _mapping(f"{len(sizes)} files", sizes)
    for title, values in (("identity", manifest.run.identity), ("settings", manifest.run.settings)):
        yield from _mapping(title, {name: value for name, value in values.items() if value not in UNUSED_VALUES})


def age_text(seconds: float) -> str:
    """Return a duration in its largest unit.

    >>> age_text(5), age_text(150), age_text(7200), age_text(300_000)
    ('5 s', '2 min', '2 h', '3 days')
    """
    for unit, length, below in (("s", 1, 60), ("min", 60, 3600), ("h", 3600, 172_800)):
        if seconds < below:
            return f"{max(0, int(seconds // length))} {unit}"
    return f"{int(seconds // 86_400)} days"


def _table(*last_columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("step", "size", "age"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("metrics", *last_columns):
        is_folded = column in ("metrics", "verdict")
        table.add_column(column, overflow="fold" if is_folded else "ellipsis", no_wrap=not is_folded)
    return table


def _cells(entry: CheckpointEntry) -> tuple[str | Text, ...]:
    """Return step, size, age and as many metrics as fit the terminal."""
    manifest = entry.manifest
    if manifest is None:
        return (str(entry.step), ABSENT, ABSENT, ABSENT)
    metrics = dict(list(manifest.metrics.items())[: max(1, width() // 30 - 1)])
    size, age = format_size(manifest.size_bytes), age_text(time.time() - manifest.created)
    return (str(entry.step), size, age, Text(_metrics(metrics)))


def _mapping(title: str, values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for number, (name, value) in enumerate(values.items()):
        yield title if number == 0 else "", f"{name}: {value}"


def _metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()) or ABSENT


def _origin(manifest: Manifest | None) -> str:
    origin = manifest.run.origin if manifest else {}
    return f"{origin['strategy']}:{origin['processes']}" if {"strategy", "processes"} <= origin.keys() else ABSENT


def _progress(progress: Mapping[str, object]) -> str:
    shown = {name: value for name, value in progress.items() if isinstance(value, int | float) and name != "version"}
    texts = {name: f"{value:,}" if isinstance(value, int) else f"{value:.4g}" for name, value in shown.items()}
    return ", ".join(f"{name.removeprefix('num_')} {text}" for name, text in texts.items()) or ABSENT


def _checked(entry: CheckpointEntry, *, read_all: bool) -> CheckedCheckpoint:
    return CheckedCheckpoint(entry, find_problems(entry, read_all=read_all))


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


GOALS = ("minimize", "maximize")


def prune(
    run: Path, *, keep_last: int | None, keep_every: int | None, keep_best: str | None, does_delete: bool
) -> None:
    """Print which checkpoints are kept and why, and delete the others if `does_delete`.

    Options default to the run's own settings. The newest good checkpoint is always kept, and bad ones are not deleted.
    Interrupted deletions are completed. Raises UserError while a run is writing to the folder, CheckpointError if no
    checkpoint is good or one could not be deleted.
    """
    location = locate_run(run)
    if location.chosen is not None:
        raise UserError(f"{run} is a single checkpoint. Pass the folder of the run to prune.")
    given = {
        "keep_last": keep_last,
        "keep_every_steps": keep_every,
        "keep_best": parse_keep_best(keep_best) if keep_best is not None else None,
    }
    section = CheckpointSection()
    if (location.run / RESOLVED_NAME).is_file():
        section = load_resolved(location.run).config.checkpoint
    else:
        print(f"{location.run / RESOLVED_NAME} does not exist: options default to the checkpoint section's defaults")
    section = section.model_copy(update={name: value for name, value in given.items() if value is not None})
    with lock_run_folder(location.run, log=print) if does_delete else nullcontext():
        verdicts = reasons_to_keep(read_entries(location.checkpoints), section)
        table = _table("verdict")
        for entry, reasons in verdicts:
            verdict = Text(f"kept: {', '.join(reasons)}") if reasons else Text("deleted", "red")
            table.add_row(*_cells(entry), verdict)
        print_table(table)
        deleted = [entry for entry, reasons in verdicts if not reasons]
        size = format_size(sum(entry.manifest.size_bytes for entry in deleted if entry.manifest))
        if does_delete and (failures := delete_checkpoints(location.checkpoints, [entry.step for entry in deleted])):
            raise CheckpointError("\n".join(failures))
    if not deleted:
        print("nothing to delete")
    elif does_delete:
        print(f"deleted {len(deleted)}, {size}")
    else:
        print(f"{len(deleted)} would be deleted, {size}. Add `--yes` to delete them.")


def parse_keep_best(value: str) -> KeepBestSection:
    """Parse `METRIC[:minimize|maximize][:COUNT]`; raises UserError for anything else.

    >>> parse_keep_best("exact_match:maximize:3").count
    3
    """
    metric, *rest = value.split(":")
    goal = rest.pop(0) if rest and rest[0] in GOALS else "minimize"
    count = rest.pop(0) if rest else "1"
    if not metric or rest or not count.isdigit() or int(count) == 0:
        raise UserError(
            f"--keep-best {value}: write a metric, such as `loss`, `loss:2` for the two best, or "
            "`exact_match:maximize`."
        )
    return KeepBestSection.model_validate({"metric": metric, "goal": goal, "count": int(count)})


def reasons_to_keep(
    entries: Sequence[CheckpointEntry], section: CheckpointSection
) -> list[tuple[CheckpointEntry, Sequence[str]]]:
    """Return each checkpoint with the reasons to keep it, none to delete it; raises CheckpointError if none is good.

    The newest and the best are read and hashed; a bad one is replaced by the next.
    """
    bad = {entry.step for entry in entries if _is_bad(entry, read_all=False)}
    by_step = {entry.step: entry for entry in entries}
    read: set[int] = set()
    while True:
        good = [step for step in by_step if step not in bad]
        if not good:
            raise CheckpointError(
                "All checkpoints are bad, so none is deleted. `finetune checkpoint verify` shows the problems."
            )
        metrics = {step: manifest.metrics for step in good if (manifest := by_step[step].manifest)}
        best = best_steps(metrics, section.keep_best) if section.keep_best else []
        required = {max(good), *best} - read
        if not required:
            break
        read |= required
        bad |= {step for step in required if _is_bad(by_step[step], read_all=True)}
    deleted = removable_steps(
        good,
        keep_last=section.keep_last,
        newest_valid=max(good),
        keep_every_steps=section.keep_every_steps,
        keep_best=section.keep_best,
        metrics=metrics,
    )
    verdicts: list[tuple[CheckpointEntry, Sequence[str]]] = []
    for step, entry in by_step.items():
        reasons = []
        if step not in good:
            reasons = ["bad, not deleted"]
        elif step not in deleted:
            if step == max(good):
                reasons.append("newest good")
            elif step in sorted(good)[-section.keep_last :]:
                reasons.append(f"last {section.keep_last}")
            if section.keep_every_steps and step % section.keep_every_steps == 0:
                reasons.append(f"every {section.keep_every_steps}")
            if section.keep_best and step in best:
                reasons.append(f"best {section.keep_best.metric}")
        verdicts.append((entry, reasons))
    return verdicts


def _is_bad(entry: CheckpointEntry, *, read_all: bool) -> bool:
    return bool(find_problems(entry, read_all=read_all))
