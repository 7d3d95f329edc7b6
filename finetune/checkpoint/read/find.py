"""Which checkpoint a run resumes from: rank 0 chooses it, all ranks verify it and agree on the outcome."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import (
    Manifest,
    OtherFormatError,
    file_checksum,
    files_to_verify,
    first_file_problem,
    read_manifest_of_step,
)
from finetune.checkpoint.format.metadata import Metadata, header_problem, read_metadata
from finetune.checkpoint.read.changes import refuse_existing_checkpoint
from finetune.checkpoint.read.checksum_prefetch import ChecksumOf
from finetune.errors import CheckpointError
from finetune.runtime import distributed
from finetune.runtime.distributed import Group
from finetune.runtime.run_on_ranks import run_on_all_ranks, run_on_rank_0
from finetune.runtime.supervision.heartbeat import fault_point

T = TypeVar("T")


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint that has been verified."""

    path: Path
    manifest: Manifest
    metadata: Metadata

    @property
    def step(self) -> int:
        """Return the step after which it was taken."""
        return self.manifest.step


def find_newest(
    folder: Path, *, log: Callable[[str], None], checksum_of: ChecksumOf = file_checksum
) -> VerifiedCheckpoint | None:
    """Return the newest checkpoint that verifies, or None in a folder without any. Collective.

    Bad ones on the way are renamed to `.bad-...` and named with what is wrong with them; when there are only bad ones,
    that is an error and not a fresh start. One of another format is an error, too, and stays where it is: continuing
    from an older one would throw away what was trained since.
    """
    while path := run_on_rank_0(lambda: layout.newest_checkpoint(folder)):
        try:
            return verify_checkpoint(path, checksum_of=checksum_of)
        except OtherFormatError:
            raise
        except CheckpointError as error:
            # All ranks come here or none: `verify` raises the same on all, and rank 0 renames when all have read.
            aside = run_on_rank_0(partial(layout.rename_aside, path, "bad"))
            if distributed.is_main():
                log(f"passed over {path.name}, now {aside.name}: {error}")
    bad = run_on_rank_0(lambda: layout.bad_checkpoints(folder))
    if bad:
        raise CheckpointError(
            f"{folder}: has no good checkpoint, only bad ones: {', '.join(path.name for path in bad)}. "
            "Delete them to begin anew, or name a checkpoint of another run in checkpoint.resume."
        )
    return None


def find_at_path(path: Path, *, folder: Path, checksum_of: ChecksumOf = file_checksum) -> VerifiedCheckpoint:
    """Return the checkpoint at this very path; raises CheckpointError when it does not verify. Collective.

    Checkpoints of `folder` that are newer would be in the way of what is trained from here: they are put aside when the
    path is one of them, and refused when it is another run's.
    """
    inner = run_on_rank_0(lambda: [each.name for each in layout.steps(path).values()])
    if inner and not (path / layout.MANIFEST).exists():
        raise CheckpointError(f"checkpoint.resume: {path} holds checkpoints; write one of them: {', '.join(inner)}")
    try:
        found = verify_checkpoint(path, checksum_of=checksum_of)
    except OtherFormatError:
        raise
    except CheckpointError as error:
        advice = "Name another one (`finetune checkpoint ls RUN` lists them), or write `auto` for the newest good one."
        raise CheckpointError(f"checkpoint.resume: {str(error).rstrip('.')}. {advice}") from error
    run_on_rank_0(lambda: _rename_newer_aside(found, folder=folder))
    return found


def refuse_existing_checkpoints(folder: Path) -> None:
    """Raise CheckpointError when the folder has checkpoints. Collective."""
    refuse_existing_checkpoint(run_on_rank_0(lambda: layout.newest_checkpoint(folder)))


def verify_checkpoint(
    path: Path, *, group: Group = Group.MAIN, checksum_of: ChecksumOf = file_checksum
) -> VerifiedCheckpoint:
    """Return the checkpoint when every file has the size and digest it was written with, and says what it should.

    Raises CheckpointError; OtherFormatError, which is one, where nothing is wrong but that this program cannot read it.
    Ranks share out the files among them; `facts` may know some of them already. Collective.
    """
    manifest = _read_on_rank_0(lambda: read_manifest_of_step(path), group=group)
    mine = files_to_verify(manifest, rank=distributed.rank(), world=distributed.world())
    _raise_first_problem(path, run_on_all_ranks(lambda: _first_problem(path, manifest, mine, checksum_of), group=group))
    texts = _read_on_rank_0(lambda: read_metadata(path, manifest), group=group)
    _raise_first_problem(path, run_on_all_ranks(lambda: _first_bad_header(path, mine, texts), group=group))
    return VerifiedCheckpoint(path, manifest, texts)


def _read_on_rank_0(act: Callable[[], T], *, group: Group) -> T:
    """Call `act` on rank 0 and return its value everywhere; an OtherFormatError stays one on all ranks. Collective."""

    def attempt() -> T | OtherFormatError:
        try:
            return act()
        except OtherFormatError as error:
            return error

    value = run_on_rank_0(attempt, group=group)
    if isinstance(value, OtherFormatError):
        raise value
    return value


def _raise_first_problem(path: Path, problems: Iterable[str | None]) -> None:
    for problem in problems:
        if problem is not None:
            raise CheckpointError(f"{path}: {problem}")


def _first_bad_header(path: Path, names: list[str], metadata: Metadata) -> str | None:
    return next((problem for name in names if (problem := header_problem(path, name, metadata.index))), None)


def _first_problem(path: Path, manifest: Manifest, names: list[str], checksum_of: ChecksumOf) -> str | None:
    for name in names:
        fault_point("load.verify", step=manifest.step, path=path / name)  # a large file takes its time: no hang
        problem = first_file_problem(path, manifest.files, [name], facts=checksum_of)
        if problem is not None:
            return problem
    return None


def _rename_newer_aside(found: VerifiedCheckpoint, *, folder: Path) -> None:
    own = layout.steps(folder)
    is_own = any(path.resolve() == found.path.resolve() for path in own.values())
    if own and not is_own:
        raise CheckpointError(
            f"checkpoint.resume: {found.path} is another run's, and {folder} has checkpoints of its own, such as "
            f"{layout.newest_checkpoint(folder)}. Write `auto` to continue from that one, or another run.folder."
        )
    for step, path in own.items():
        if step > found.step:
            layout.rename_aside(path, "superseded")
