"""Tables of checkpoints that fit a narrow terminal."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich import box
from rich.table import Table
from rich.text import Text

from finetune.checkpoint.format.manifest import Manifest
from finetune.checkpoint.read.inventory import BadFile, CheckpointEntry, Leftover, TensorCount
from finetune.runtime.resources import format_size
from finetune.runtime.text.terminal import printable

ABSENT = "-"
UNUSED_VALUES = ("null", "written")
"""Values of unset keys, and of sections whose keys are also listed."""


@dataclass(frozen=True)
class CheckedCheckpoint:
    """A checkpoint with its problems."""

    entry: CheckpointEntry
    problems: tuple[str, ...]
    bad_files: tuple[BadFile, ...]

    @property
    def is_good(self) -> bool:
        """Return whether no problem was found."""
        return not self.problems


def checkpoints_table(checkpoints: Sequence[CheckedCheckpoint], *, now: float, width: int) -> Table:
    """Return a row for each checkpoint, with as many metrics as fit the width."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("step", "size", "age"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("metrics", overflow="fold")
    for column in ("written by", "state"):
        table.add_column(column, no_wrap=True)
    for checkpoint in checkpoints:
        state = Text("good", "green") if checkpoint.is_good else Text("BAD", "bold red")
        table.add_row(
            *_row(checkpoint.entry, now=now, width=width), Text(printable(_origin(checkpoint.entry.manifest))), state
        )
    return table


def checkpoints_notes(
    checkpoints: Sequence[CheckedCheckpoint], leftovers: Sequence[Leftover], *, verifies: bool
) -> Iterator[str]:
    """Yield the lines below the table: problems of bad checkpoints, leftovers, and a note about skipped checks."""
    for checkpoint in checkpoints:
        for problem in checkpoint.problems:
            yield f"{checkpoint.entry.path.name}: {problem}"
    if checkpoints and not verifies:
        yield "Only sizes were compared; `--verify` reads every file."
    if leftovers:
        yield "Leftovers, which no run resumes from:"
    for left in leftovers:
        yield f"  {left.path.name} ({format_size(left.size_bytes)}) {left.meaning}"


def prune_table(verdicts: Sequence[tuple[CheckpointEntry, Sequence[str]]], *, now: float, width: int) -> Table:
    """Return a row for each checkpoint with the reasons to keep it; without a reason it is deleted."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("step", "size", "age"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("metrics", "verdict"):
        table.add_column(column, overflow="fold")
    for entry, reasons in verdicts:
        verdict = Text(f"kept: {', '.join(reasons)}") if reasons else Text("deleted", "red")
        table.add_row(*_row(entry, now=now, width=width), verdict)
    return table


def checkpoint_facts(
    checkpoint: CheckedCheckpoint, *, counts: Sequence[TensorCount], now: float
) -> Iterator[tuple[str, str]]:
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
    yield "written", f"{date}, {age_text(now - manifest.created)} ago, by {_origin(manifest)}"
    yield "metrics", _metrics(manifest.metrics)
    yield "progress", _progress(progress)
    for count in counts:
        tensors = f"{count.num_tensors} tensor{'' if count.num_tensors == 1 else 's'}"
        yield count.kind, f"{tensors}, {count.num_elements:,} elements, {', '.join(count.dtypes)}"
    yield "versions", ", ".join(f"{name} {number}" for name, number in manifest.versions.items())
    sizes = {name: f"{format_size(file.size_bytes)}, sha256 {file.sha256}" for name, file in manifest.files.items()}
    yield from _mapping(f"{len(sizes)} files", sizes)
    yield from _mapping(
        "identity", {name: value for name, value in manifest.run.identity.items() if value not in UNUSED_VALUES}
    )
    if manifest.run.settings:
        yield "settings", f"{len(manifest.run.settings)} others, which may change on resume: see --json"


def age_text(seconds: float) -> str:
    """Return a duration in its largest unit.

    >>> age_text(5), age_text(150), age_text(7200), age_text(300_000)
    ('5 s', '2 min', '2 h', '3 days')
    """
    for unit, length, below in (("s", 1, 60), ("min", 60, 3600), ("h", 3600, 172_800)):
        if seconds < below:
            return f"{max(0, int(seconds // length))} {unit}"
    return f"{int(seconds // 86_400)} days"


def _row(entry: CheckpointEntry, *, now: float, width: int) -> tuple[str | Text, ...]:
    manifest = entry.manifest
    if manifest is None:
        return (str(entry.step), ABSENT, ABSENT, ABSENT)
    shown = 1 if width < 70 else 2 if width < 90 else 3
    metrics = dict(list(manifest.metrics.items())[:shown])
    size, age = format_size(manifest.size_bytes), age_text(now - manifest.created)
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
    return ", ".join(f"{name.removeprefix('num_')} {_number(value)}" for name, value in shown.items()) or ABSENT


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
