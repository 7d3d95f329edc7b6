"""Lists a run's checkpoints and what is wrong with each, down to the damaged tensor. Needs neither torch nor ranks."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import Manifest, first_file_problem, read_manifest
from finetune.checkpoint.format.metadata import header_problem, read_index, read_metadata
from finetune.errors import CheckpointError, UserError
from finetune.runtime.files.read import open_regular, parse_json, read_regular
from finetune.runtime.progress import parse_progress

_BLOCK_BYTES = 8 << 20
_MAX_HEADER_BYTES = 100_000_000  # of the safetensors format


def damaged_tensors(path: Path, entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of the tensors whose values are not those that were saved.

    `entries` is what the index says of the tensors in the file. All of them count as damaged where the file cannot be
    read as safetensors, none where only the header's text differs.
    """
    try:
        with open_regular(path) as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            places: dict[str, Any] = parse_json(file.read(min(header_bytes, _MAX_HEADER_BYTES)))
            return [
                name for name in entries if _digest(file, places[name], 8 + header_bytes) != entries[name]["sha256"]
            ]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError):
        return list(entries)


def _digest(file: BinaryIO, place: Mapping[str, Any], start: int) -> str:
    first, last = place["data_offsets"]
    digest = hashlib.sha256()
    file.seek(start + first)
    missing = last - first
    while missing > 0 and (block := file.read(min(missing, _BLOCK_BYTES))):
        digest.update(block)
        missing -= len(block)
    return digest.hexdigest()


LEFTOVERS = {
    ".bad-": "did not verify and was put aside",
    ".superseded-": "was newer than a checkpoint that a run went back to",
    ".deleted-": "was being deleted when something got in between",
    ".staging-": "is being written, or its writer was killed",
    ".fetched-": "is being fetched from the run's URL, or its reader was killed",
}
"""What a hidden folder beside the checkpoints is, by how its name begins."""

NOT_A_CHECKPOINT_NAME = "is no checkpoint's folder: those are called step- and six digits or more, such as step-000400"


@dataclass(frozen=True)
class RunLocation:
    """What a user means by naming a run: its folder, the folder of its checkpoints, and one of them where it is one."""

    run: Path
    checkpoints: Path
    chosen: Path | None


@dataclass(frozen=True)
class BadFile:
    """One file of a checkpoint that is not as its manifest says, and which tensors in it are not as they were saved."""

    name: str  # relative to the checkpoint
    problem: str  # a sentence that names the file
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint as it lies on the disk: what its manifest says, or why there is none to believe."""

    path: Path
    manifest: Manifest | None
    problem: str | None  # what is wrong with the manifest

    @property
    def step(self) -> int:
        """Return the step in the folder's name, else the manifest's; -1 where neither tells."""
        named = layout.step_of(self.path)
        return named if named is not None else self.manifest.step if self.manifest else -1

    @cached_property
    def index(self) -> Mapping[str, Mapping[str, Any]]:
        """Return what the checkpoint says of each tensor in it; empty where that cannot be believed."""
        try:
            return read_index(self.path, self.manifest) if self.manifest else {}
        except (CheckpointError, OSError):
            return {}

    @cached_property
    def progress(self) -> Mapping[str, Any]:
        """Return how far the run had come; empty where that cannot be believed."""
        try:
            return parse_progress(read_regular(self.path / layout.PROGRESS)).state_dict()
        except (OSError, ValueError):
            return {}

    def bad_files(self, *, reads: bool) -> tuple[BadFile, ...]:
        """Return the files that are missing or have another size, and, where all are to be read, another digest.

        Those that are no tensors are small and always read.
        """
        if self.manifest is None:
            return ()
        found = {name: self._problem(name, reads=reads) for name in sorted(self.manifest.files)}
        return tuple(BadFile(name, problem, self._damaged_in(name)) for name, problem in found.items() if problem)

    def metadata_problem(self, *, reads: bool) -> str | None:
        """Return what index, scalars, progress or a tensor file's header say that no checkpoint does.

        Asked of a checkpoint without bad files; the headers are read only where all files are to be.
        """
        if self.manifest is None:
            return None
        try:
            texts = read_metadata(self.path, self.manifest)
        except CheckpointError as error:
            return str(error).removeprefix(f"{self.path}: ")
        names = self.manifest.files if reads else ()
        return next((problem for name in names if (problem := header_problem(self.path, name, texts.index))), None)

    def _problem(self, name: str, *, reads: bool) -> str | None:
        assert self.manifest is not None
        facts = self.manifest.files
        reads = reads or name in layout.METADATA_FILES
        path = self.path / name
        try:
            is_as_long = path.is_file() and not path.is_symlink() and path.stat().st_size == facts[name].size_bytes
            return first_file_problem(self.path, facts, [name]) if reads or not is_as_long else None
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"

    def _damaged_in(self, name: str) -> tuple[str, ...]:
        inside = {stored: entry for stored, entry in self.index.items() if entry.get("file") == name}
        return tuple(damaged_tensors(self.path / name, inside))


@dataclass(frozen=True)
class Leftover:
    """A hidden folder beside the checkpoints that no run continues from."""

    path: Path
    size_bytes: int
    meaning: str


@dataclass(frozen=True)
class TensorCount:
    """How many tensors of one kind a checkpoint holds, and how many numbers are in them."""

    kind: str  # `parameter`, `buffer` or the optimizer's word
    num_tensors: int
    num_elements: int
    dtypes: tuple[str, ...]


def locate_run(written: Path) -> RunLocation:
    """Return what is meant by a run's folder, its `checkpoints/` or one checkpoint; else raises UserError."""
    path = written.expanduser().absolute()
    if not path.is_dir():
        raise UserError(f"{written}: there is no such folder. Name a run's folder, such as runs/first.")
    if (path / layout.MANIFEST).is_file() or layout.step_of(path) is not None:
        return RunLocation(path.parent.parent, path.parent, path)
    if (path / layout.CHECKPOINTS).is_dir():
        return RunLocation(path, path / layout.CHECKPOINTS, None)
    if path.name == layout.CHECKPOINTS or layout.steps(path):
        return RunLocation(path.parent, path, None)
    raise UserError(
        f"{written}: this is no run that has saved itself: it holds neither `checkpoints/` nor step folders. "
        "Name a run's folder (`run.folder` in its job)."
    )


def select_checkpoint(place: RunLocation, *, step: int | None) -> Path:
    """Return the one checkpoint that is meant: the folder that was named, that of the step, or the newest."""
    if place.chosen is not None:
        if step is not None and layout.step_of(place.chosen) != step:
            raise UserError(f"{place.chosen} is one checkpoint already; leave out --step {step}, or name the run.")
        return place.chosen
    found = layout.steps(place.checkpoints)
    if not found:
        raise CheckpointError(f"{place.checkpoints}: there is no checkpoint in it.")
    if step is not None and step not in found:
        raise CheckpointError(
            f"{place.checkpoints}: there is no checkpoint of step {step}. There are: {', '.join(map(str, found))}."
        )
    return found[step if step is not None else max(found)]


def read_entry(path: Path) -> CheckpointEntry:
    """Return the checkpoint in the folder, whatever state it is in."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return CheckpointEntry(path, None, str(error).removeprefix(f"{path}: ").removeprefix(f"{path}/"))
    named = layout.step_of(path)
    if named is not None and named != manifest.step:
        return CheckpointEntry(
            path, manifest, f"the folder is called step {named} and its manifest says step {manifest.step}"
        )
    return CheckpointEntry(path, manifest, None)


def find_problems(entry: CheckpointEntry, *, reads: bool) -> tuple[tuple[str, ...], tuple[BadFile, ...]]:
    """Return everything that is wrong with a checkpoint, as sentences, and the bad files among it.

    `reads`: every file, and not only those that are no tensors.
    """
    bad = entry.bad_files(reads=reads)
    found = [entry.problem, *(file.problem for file in bad)]
    if not any(found):
        found.append(entry.metadata_problem(reads=reads))
    return tuple(each for each in found if each), bad


def read_entries(checkpoints: Path) -> list[CheckpointEntry]:
    """Return all folders that bear a checkpoint's name, oldest first."""
    return [read_entry(path) for path in layout.steps(checkpoints).values()]


def find_leftovers(checkpoints: Path) -> list[Leftover]:
    """Return the hidden folders that saving, resuming and pruning have left, by name."""
    hidden = [
        Leftover(path, _size_bytes(path), meaning)
        for path in sorted(checkpoints.iterdir())
        for prefix, meaning in LEFTOVERS.items()
        if path.name.startswith(prefix) and path.is_dir()
    ]
    return hidden + [
        Leftover(path, _size_bytes(path), NOT_A_CHECKPOINT_NAME) for path in layout.misnamed_checkpoints(checkpoints)
    ]


def count_tensors(entry: CheckpointEntry) -> list[TensorCount]:
    """Return the checkpoint's tensors counted by kind, in the order in which they first appear."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for each in entry.index.values():
        kinds.setdefault(str(each["key"]), []).append(each)
    return [
        TensorCount(
            kind,
            num_tensors=len(found),
            num_elements=sum(prod(each["shape"]) for each in found),
            dtypes=tuple(sorted({str(each["dtype"]) for each in found})),
        )
        for kind, found in kinds.items()
    ]


def _size_bytes(folder: Path) -> int:
    """Return the size of all files; what vanishes meanwhile, because a save is going on, is not counted."""
    return sum(_file_bytes(folder))


def _file_bytes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                yield path.stat().st_size
        except OSError:
            continue
