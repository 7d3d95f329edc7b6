"""Finds the checkpoint that a run resumes from: rank 0 chooses it, all ranks verify it and agree."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import (
    Manifest,
    Metadata,
    OtherFormatError,
    file_checksum,
    files_to_verify,
    first_file_problem,
    header_problem,
    read_manifest_of_step,
    read_metadata,
)
from finetune.checkpoint.read.changes import refuse_existing_checkpoint
from finetune.checkpoint.read.checksum_prefetch import ChecksumOf
from finetune.errors import CheckpointError
from finetune.runtime import distributed
from finetune.runtime.distributed import Group, run_on_all_ranks, run_on_rank_0
from finetune.runtime.supervision.heartbeat import fault_point

T = TypeVar("T")


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint whose files and metadata were all verified."""

    path: Path
    manifest: Manifest
    metadata: Metadata

    @property
    def step(self) -> int:
        """Return the step after which it was saved."""
        return self.manifest.step


def find_checkpoint(
    folder: Path, *, resume: str | Path, log: Callable[[str], None], checksum_of: ChecksumOf = file_checksum
) -> VerifiedCheckpoint | None:
    """Return the verified checkpoint of `checkpoint.resume`; None to start from scratch. Collective.

    Raises CheckpointError if the given path is not a valid checkpoint, or for `never` if the folder has checkpoints.
    """
    if resume == "never":
        refuse_existing_checkpoint(run_on_rank_0(lambda: layout.newest_checkpoint(folder)))
        return None
    if resume == "auto":
        return _find_newest(folder, log=log, checksum_of=checksum_of)
    return _find_at_path(Path(resume), folder=folder, checksum_of=checksum_of)


def verify_checkpoint(
    path: Path, *, group: Group = Group.HOST, checksum_of: ChecksumOf = file_checksum
) -> VerifiedCheckpoint:
    """Return the checkpoint if all files match their sizes and digests, and its metadata is consistent.

    Raises CheckpointError; its subclass OtherFormatError if the checkpoint is intact but of another format version. The
    files are divided among the ranks; `checksum_of` may have computed some checksums already. Collective.
    """
    manifest = _read_on_rank_0(lambda: read_manifest_of_step(path), group=group)
    own_files = files_to_verify(manifest, rank=distributed.rank(), world=distributed.world())

    def file_problem(name: str) -> str | None:
        # A heartbeat, so that a large file does not count as a hang.
        fault_point("load.verify", step=manifest.step, path=path / name)
        return first_file_problem(path, manifest.files, [name], checksum_of=checksum_of)

    def raise_first(problem_of: Callable[[str], str | None]) -> None:
        first = run_on_all_ranks(lambda: next(filter(None, map(problem_of, own_files)), None), group=group)
        for problem in filter(None, first):
            raise CheckpointError(f"{path}: {problem}")

    raise_first(file_problem)
    metadata = _read_on_rank_0(lambda: read_metadata(path, manifest), group=group)
    raise_first(lambda name: header_problem(path, name, metadata.index))
    return VerifiedCheckpoint(path, manifest, metadata)


def _find_newest(folder: Path, *, log: Callable[[str], None], checksum_of: ChecksumOf) -> VerifiedCheckpoint | None:
    """Return the newest checkpoint that passes verification, or None in a folder without any. Collective.

    Newer bad ones are renamed to `.bad-...`, and their problems are logged; if all are bad, that is an error, not a
    fresh start. One of another format version is also an error and is not changed: resuming from an older one would
    lose its training.
    """
    while path := run_on_rank_0(lambda: layout.newest_checkpoint(folder)):
        try:
            return verify_checkpoint(path, checksum_of=checksum_of)
        except OtherFormatError:
            raise
        except CheckpointError as error:
            # `verify_checkpoint` raises the same on all ranks, after all have read: rank 0 may rename.
            aside = run_on_rank_0(partial(layout.rename_aside, path, "bad"))
            if distributed.is_main():
                log(f"skipped {path.name}, renamed to {aside.name}: {error}")
    bad = run_on_rank_0(lambda: sorted(folder.glob(".bad-step-*")))
    if bad:
        raise CheckpointError(
            f"{folder}: has no valid checkpoint, only damaged ones: {', '.join(path.name for path in bad)}. "
            "Delete them to start from scratch, or set checkpoint.resume to a checkpoint of another run."
        )
    return None


def _find_at_path(path: Path, *, folder: Path, checksum_of: ChecksumOf) -> VerifiedCheckpoint:
    """Return the checkpoint at this path; raises CheckpointError if it fails verification. Collective.

    If the path is in `folder`, newer checkpoints, which would collide with future ones, are renamed. If it belongs to
    another run and `folder` has checkpoints, raises CheckpointError.
    """
    inner = run_on_rank_0(lambda: [checkpoint.name for checkpoint in layout.steps(path).values()])
    if inner and not (path / layout.MANIFEST).exists():
        raise CheckpointError(
            f"checkpoint.resume: {path} is a folder of checkpoints; write one of them: {', '.join(inner)}"
        )
    try:
        checkpoint = verify_checkpoint(path, checksum_of=checksum_of)
    except OtherFormatError:
        raise
    except CheckpointError as error:
        advice = "Write another one (`finetune checkpoint ls RUN` lists them), or `auto` for the newest valid one."
        raise CheckpointError(f"checkpoint.resume: {str(error).rstrip('.')}. {advice}") from error

    def rename_newer_aside() -> None:
        own = layout.steps(folder)
        if own and all(other.resolve() != path.resolve() for other in own.values()):
            raise CheckpointError(
                f"checkpoint.resume: {path} belongs to another run, but {folder} has its own checkpoints, such as "
                f"{layout.newest_checkpoint(folder)}. Write `auto` to resume from that one, or another run.folder."
            )
        for step, other in own.items():
            if step > checkpoint.step:
                layout.rename_aside(other, "superseded")

    run_on_rank_0(rename_newer_aside)
    return checkpoint


def _read_on_rank_0(function: Callable[[], T], *, group: Group) -> T:
    """Call `function` on rank 0 and return its value on all; an OtherFormatError is raised on all. Collective."""

    def attempt() -> T | OtherFormatError:
        try:
            return function()
        except OtherFormatError as error:
            return error

    value = run_on_rank_0(attempt, group=group)
    if isinstance(value, OtherFormatError):
        raise value
    return value
