"""Lists a run's checkpoints and their problems. Needs neither torch nor ranks."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import (
    Manifest,
    first_file_problem,
    header_problem,
    read_index,
    read_manifest,
    read_metadata,
)
from finetune.errors import CheckpointError, UserError
from finetune.runtime.files.read import read_regular
from finetune.runtime.progress import parse_progress
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER

LEFTOVERS = {
    ".bad-": "failed verification and was renamed",
    ".superseded-": "was newer than a checkpoint from which a run was resumed",
    ".deleted-": "is being deleted, or its deletion was interrupted",
    ".staging-": "is being written, or its writer was killed",
    ".fetched-": "is being downloaded from the run's URL, or its download was killed",
}
"""The meaning of a hidden folder next to the checkpoints, by the prefix of its name."""

NOT_A_CHECKPOINT_NAME = "is not a checkpoint: their names are `step-` and at least six digits, such as step-000400"


@dataclass(frozen=True)
class RunLocation:
    """The folders that a path given by a user belongs to: the run, its checkpoints, the checkpoint if it is one."""

    run: Path
    checkpoints: Path
    chosen: Path | None


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint on disk, valid or not: its manifest, or the problem of it."""

    path: Path
    manifest: Manifest | None
    problem: str | None  # of the manifest

    @property
    def step(self) -> int:
        """Return the step in the folder's name, else the manifest's; -1 if neither has one."""
        named = layout.step_of(self.path)
        return named if named is not None else self.manifest.step if self.manifest else -1

    @cached_property
    def index(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the index entry of each tensor; empty if the index is invalid."""
        try:
            return read_index(self.path, self.manifest) if self.manifest else {}
        except (CheckpointError, OSError):
            return {}

    @cached_property
    def progress(self) -> Mapping[str, Any]:
        """Return the run's progress; empty if the file is invalid."""
        try:
            return parse_progress(read_regular(self.path / layout.PROGRESS)).state_dict()
        except (OSError, ValueError):
            return {}

    def file_problems(self, *, read_all: bool) -> list[str]:
        """Return the files that are missing or have another size, and with `read_all` those with another digest.

        The JSON files are small and always read.
        """
        problems = []
        expected = self.manifest.files if self.manifest else {}
        for name in sorted(expected):
            path, reads = self.path / name, read_all or name in layout.METADATA_FILES
            try:
                has_size = path.is_file() and not path.is_symlink() and path.stat().st_size == expected[name].size_bytes
                problem = first_file_problem(self.path, expected, [name]) if reads or not has_size else None
            except OSError as error:
                problem = f"{name} cannot be read: {error.strerror}"
            problems += [problem] if problem else []
        return problems


@dataclass(frozen=True)
class Leftover:
    """A hidden folder next to the checkpoints that no run resumes from."""

    path: Path
    size_bytes: int
    meaning: str


@dataclass(frozen=True)
class TensorCount:
    """The number of tensors with the same key in a checkpoint, and of their elements."""

    kind: str  # `parameter`, `buffer` or the key in the optimizer's state
    num_tensors: int
    num_elements: int
    dtypes: tuple[str, ...]


def locate_run(given: Path) -> RunLocation:
    """Return the run that a run's folder, its `checkpoints/` or one checkpoint belongs to; else raises UserError."""
    path = given.expanduser().absolute()
    if not path.is_dir():
        raise UserError(f"{given}: no such folder. Give a run's folder, such as runs/first.")
    if (path / layout.MANIFEST).is_file() or layout.step_of(path) is not None:
        return RunLocation(path.parent.parent, path.parent, path)
    if (path / CHECKPOINTS_FOLDER).is_dir():
        return RunLocation(path, path / CHECKPOINTS_FOLDER, None)
    if path.name == CHECKPOINTS_FOLDER or layout.steps(path):
        return RunLocation(path.parent, path, None)
    raise UserError(
        f"{given}: not a run with checkpoints: it has neither `checkpoints/` nor step folders. "
        "Give a run's folder (`run.folder` in its job file)."
    )


def select_checkpoint(location: RunLocation, *, step: int | None) -> Path:
    """Return one checkpoint: the given folder, that of the step, or the newest."""
    if location.chosen is not None:
        if step is not None and layout.step_of(location.chosen) != step:
            raise UserError(
                f"{location.chosen} is a single checkpoint: leave out --step {step}, or give the run's folder."
            )
        return location.chosen
    folders = layout.steps(location.checkpoints)
    if not folders:
        raise CheckpointError(f"{location.checkpoints}: has no checkpoints.")
    if step is not None and step not in folders:
        raise CheckpointError(
            f"{location.checkpoints}: has no checkpoint of step {step}. Available: {', '.join(map(str, folders))}."
        )
    return folders[step if step is not None else max(folders)]


def read_entry(path: Path) -> CheckpointEntry:
    """Return the checkpoint in the folder, valid or not."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return CheckpointEntry(path, None, str(error).removeprefix(f"{path}: ").removeprefix(f"{path}/"))
    named = layout.step_of(path)
    if named is not None and named != manifest.step:
        return CheckpointEntry(
            path, manifest, f"the folder is named step {named}, but its manifest says step {manifest.step}"
        )
    return CheckpointEntry(path, manifest, None)


def find_problems(entry: CheckpointEntry, *, read_all: bool) -> tuple[str, ...]:
    """Return all problems of a checkpoint, as sentences; reads every file with `read_all`, else only the JSON files."""
    problems = [entry.problem, *entry.file_problems(read_all=read_all)]
    if not any(problems) and entry.manifest is not None:
        try:
            index = read_metadata(entry.path, entry.manifest).index
            headers = (header_problem(entry.path, name, index) for name in (entry.manifest.files if read_all else ()))
            problems.append(next(filter(None, headers), None))
        except CheckpointError as error:
            problems.append(str(error).removeprefix(f"{entry.path}: "))
    return tuple(problem for problem in problems if problem)


def read_entries(checkpoints: Path) -> list[CheckpointEntry]:
    """Return an entry for every folder with a checkpoint's name, oldest first."""
    return [read_entry(path) for path in layout.steps(checkpoints).values()]


def find_leftovers(checkpoints: Path) -> list[Leftover]:
    """Return the hidden leftover folders of saving, resuming and pruning, by name."""
    hidden = [
        Leftover(path, _size_bytes(path), meaning)
        for path in sorted(checkpoints.iterdir())
        for prefix, meaning in LEFTOVERS.items()
        if path.name.startswith(prefix) and path.is_dir()
    ]
    named = sorted(checkpoints.glob("step-*"))  # copies, broken links and files among them
    misnamed = [path for path in named if layout.step_of(path) is None or not path.is_dir()]
    return hidden + [Leftover(path, _size_bytes(path), NOT_A_CHECKPOINT_NAME) for path in misnamed]


def count_tensors(entry: CheckpointEntry) -> list[TensorCount]:
    """Return the checkpoint's tensors counted by key, in the order of their first appearance."""
    by_key: dict[str, list[Mapping[str, Any]]] = {}
    for tensor in entry.index.values():
        by_key.setdefault(str(tensor["key"]), []).append(tensor)
    return [
        TensorCount(
            key,
            num_tensors=len(tensors),
            num_elements=sum(prod(tensor["shape"]) for tensor in tensors),
            dtypes=tuple(sorted({str(tensor["dtype"]) for tensor in tensors})),
        )
        for key, tensors in by_key.items()
    ]


def _size_bytes(folder: Path) -> int:
    """Return the size of all files; files that a running save removes are not counted."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            size += path.stat().st_size if path.is_file() else 0
    return size
