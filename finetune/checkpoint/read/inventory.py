"""Lists a run's checkpoints and their problems, down to damaged tensors. Needs neither torch nor ranks."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

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
from finetune.runtime.files.read import open_regular, parse_json, read_regular
from finetune.runtime.progress import parse_progress
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER

_BLOCK_BYTES = 8 << 20
_MAX_HEADER_BYTES = 100_000_000  # of the safetensors format


def damaged_tensors(path: Path, entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of the tensors whose values differ from the saved ones.

    `entries` are the index entries of the tensors in the file. All count as damaged if the file cannot be read as
    safetensors, none if only the text of the header differs.
    """
    try:
        with open_regular(path) as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = parse_json(file.read(min(header_bytes, _MAX_HEADER_BYTES)))
            return [
                name for name in entries if _digest(file, header[name], 8 + header_bytes) != entries[name]["sha256"]
            ]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError):
        return list(entries)


def _digest(file: BinaryIO, entry: Mapping[str, Any], start: int) -> str:
    first, last = entry["data_offsets"]
    digest = hashlib.sha256()
    file.seek(start + first)
    missing = last - first
    while missing > 0 and (block := file.read(min(missing, _BLOCK_BYTES))):
        digest.update(block)
        missing -= len(block)
    return digest.hexdigest()


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
class BadFile:
    """A file of a checkpoint that does not match its manifest, and the tensors in it that are damaged."""

    name: str  # relative to the checkpoint
    problem: str  # a sentence that names the file
    tensors: tuple[str, ...]


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

    def bad_files(self, *, read_all: bool) -> tuple[BadFile, ...]:
        """Return the files that are missing or have another size, and with `read_all` those with another digest.

        The JSON files are small and always read.
        """
        if self.manifest is None:
            return ()
        problems = {name: self._problem(name, read_all=read_all) for name in sorted(self.manifest.files)}
        bad = {name: problem for name, problem in problems.items() if problem}
        inside = {
            name: {stored: each for stored, each in self.index.items() if each.get("file") == name} for name in bad
        }
        return tuple(
            BadFile(name, problem, tuple(damaged_tensors(self.path / name, inside[name])))
            for name, problem in bad.items()
        )

    def metadata_problem(self, *, read_all: bool) -> str | None:
        """Return the problem of index, scalars, progress or, with `read_all`, of a tensor file's header.

        For a checkpoint without bad files.
        """
        if self.manifest is None:
            return None
        try:
            metadata = read_metadata(self.path, self.manifest)
        except CheckpointError as error:
            return str(error).removeprefix(f"{self.path}: ")
        names = self.manifest.files if read_all else ()
        return next((problem for name in names if (problem := header_problem(self.path, name, metadata.index))), None)

    def _problem(self, name: str, *, read_all: bool) -> str | None:
        assert self.manifest is not None
        expected = self.manifest.files
        reads = read_all or name in layout.METADATA_FILES
        path = self.path / name
        try:
            has_size = path.is_file() and not path.is_symlink() and path.stat().st_size == expected[name].size_bytes
            return first_file_problem(self.path, expected, [name]) if reads or not has_size else None
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"


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


def find_problems(entry: CheckpointEntry, *, read_all: bool) -> tuple[tuple[str, ...], tuple[BadFile, ...]]:
    """Return all problems of a checkpoint, as sentences, and its bad files.

    Reads every file with `read_all`, else only the JSON files.
    """
    bad = entry.bad_files(read_all=read_all)
    problems = [entry.problem, *(file.problem for file in bad)]
    if not any(problems):
        problems.append(entry.metadata_problem(read_all=read_all))
    return tuple(problem for problem in problems if problem), bad


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
    """Return the size of all files; those that a running save removes are not counted."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            size += path.stat().st_size if path.is_file() else 0
    return size
