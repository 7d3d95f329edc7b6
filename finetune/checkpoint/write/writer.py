"""Writes one checkpoint: staged, verified, with its manifest last, and renamed, so it appears atomically."""

import errno
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from finetune import __version__
from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import (
    FileChecksum,
    Manifest,
    RunFingerprint,
    file_checksum,
    first_file_problem,
    write_manifest,
)
from finetune.checkpoint.format.metadata import state_digest
from finetune.checkpoint.format.tensor_file import BUFFER, TensorFile, TensorRecord
from finetune.checkpoint.sharding.save_plan import PlannedFile
from finetune.checkpoint.write.snapshot import Contents
from finetune.errors import CheckpointError, NonFiniteError
from finetune.runtime import distributed
from finetune.runtime.distributed import Group, run_on_all_ranks, run_on_rank_0
from finetune.runtime.files import atomic
from finetune.runtime.parameters import is_finite
from finetune.runtime.resources import format_size, free_bytes
from finetune.runtime.run_folder import require_newest_attempt
from finetune.runtime.supervision.heartbeat import fault_point

SLACK_BYTES = 16 << 20
"""Upper bound of the files of a checkpoint without its tensors."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class WrittenFiles:
    """The written files of one rank or of all."""

    files: dict[str, FileChecksum] = field(default_factory=dict)  # by path in the checkpoint
    tensors: dict[str, str] = field(default_factory=dict)  # SHA-256 by stored name
    not_finite: list[str] = field(default_factory=list)  # stored names of tensors that are not finite

    @classmethod
    def merge(cls, shares: Sequence["WrittenFiles"]) -> "WrittenFiles":
        """Return the written files of all ranks."""
        total = cls()
        for share in shares:
            total.files.update(share.files)
            total.tensors.update(share.tensors)
            total.not_finite.extend(share.not_finite)
        return total


class RankWriter:
    """Writes the files of one rank; an error is raised only by `close`, since other ranks wait for this one."""

    def __init__(self, staging: Path, *, step: int) -> None:
        self._staging = staging
        self._step = step
        self._open: dict[str, TensorFile] = {}
        self._written = WrittenFiles()
        self._failure: Exception | None = None

    def add(self, file: PlannedFile, record: TensorRecord, tensor: Tensor) -> None:
        """Write the next tensor of the file, unless an earlier one failed."""
        if self._failure is not None:
            return
        try:
            with explain_disk_errors(self._staging):
                self._add(file, record, tensor)
        except Exception as error:  # raised by `close`, on every rank
            self._failure = error

    def close(self) -> WrittenFiles:
        """Fsync the files, verify them by reading them back and return their checksums; raises the first failure."""
        if self._failure is not None:
            for file in self._open.values():
                file.abandon()
            raise self._failure
        with explain_disk_errors(self._staging):
            for name, file in self._open.items():
                self._written.files[name] = file.close()
            self._verify(self._written.files)
        return self._written

    def _add(self, file: PlannedFile, record: TensorRecord, tensor: Tensor) -> None:
        path = self._staging / file.name
        if file.name not in self._open:
            path.parent.mkdir(exist_ok=True)
            self._open[file.name] = TensorFile(path, file.records)
        fault_point("save.write", step=self._step, path=path)
        self._written.tensors[record.stored_name] = self._open[file.name].add(tensor)
        if record.key != BUFFER and not is_finite(tensor):
            self._written.not_finite.append(record.stored_name)

    def _verify(self, files: Mapping[str, FileChecksum]) -> None:
        for name in files:
            problem = first_file_problem(self._staging, files, [name])
            if problem is not None:
                raise CheckpointError(f"{self._staging}: {problem}, right after it was written. Check the disk.")
            fault_point("save.written", step=self._step, path=self._staging / name)


def write_contents(folder: Path, contents: Contents, *, run: RunFingerprint, group: Group = Group.HOST) -> Manifest:
    """Write the contents as a checkpoint in `folder` and return its manifest; a failure leaves nothing.

    Raises CheckpointError if it cannot be written, NonFiniteError if a tensor is not finite. Collective.
    """
    staging = layout.staging_folder(folder, contents.step)
    # No rank writes before the folder exists and leftovers of earlier saves are removed.
    run_on_rank_0(partial(_stage, staging, num_bytes=contents.size_bytes), group=group)
    try:
        writer = RankWriter(staging, step=contents.step)
        for file, record, tensor in contents.tensors():
            writer.add(file, record, tensor)
            del tensor  # freed before the next ones are gathered
        written = WrittenFiles.merge(run_on_all_ranks(writer.close, group=group))
        if written.not_finite:
            newest = run_on_rank_0(partial(layout.newest_checkpoint, folder), group=group)
            raise NonFiniteError(_not_finite(contents.step, names=written.not_finite, newest=newest))
        # Rank 0 writes the manifest after every rank has reported its files; all ranks wait for the rename.
        manifest = run_on_rank_0(partial(_commit, staging, contents, run=run, written=written), group=group)
    except (CheckpointError, NonFiniteError):
        # All ranks have finished writing (the error was gathered from all), so no file reappears.
        if distributed.is_main():
            shutil.rmtree(staging, ignore_errors=True)
        raise
    final = layout.step_folder(folder, contents.step)
    own = next((final / file.name for file in contents.planned if file.writer == distributed.rank()), None)
    run_on_all_ranks(partial(fault_point, "save.done", step=contents.step, path=own), group=group)
    return manifest


def _stage(staging: Path, *, num_bytes: int) -> None:
    require_newest_attempt()
    with explain_disk_errors(staging.parent):
        staging.parent.mkdir(parents=True, exist_ok=True)
        layout.remove_staging(staging.parent)
        require_disk_space(staging.parent, num_bytes)
        staging.mkdir()


def _commit(staging: Path, contents: Contents, *, run: RunFingerprint, written: WrittenFiles) -> Manifest:
    """Write the JSON files, the manifest last, and rename the folder to its final name."""
    index = {
        record.stored_name: {
            "file": file.name,
            "name": record.name,
            "key": record.key,
            "shape": record.shape,
            "dtype": record.dtype,
            "sha256": written.tensors[record.stored_name],
        }
        for file in contents.planned
        for record in file.records
    }
    metadata = {layout.INDEX: index, layout.SCALARS: contents.scalars, layout.PROGRESS: contents.progress}
    final = layout.step_folder(staging.parent, contents.step)
    with explain_disk_errors(staging):
        for name, value in metadata.items():
            atomic.write_json(staging / name, value, exact=True)
        checksums = {name: file_checksum(staging / name) for name in metadata}
        manifest = _manifest(contents, run=run, files={**checksums, **written.files}, index=index)
        for folder in {(staging / name).parent for name in manifest.files}:
            atomic.fsync(folder)
        fault_point("save.manifest", step=contents.step)
        write_manifest(staging, manifest)
        fault_point("save.rename", step=contents.step)
        require_newest_attempt()
        staging.rename(final)
        atomic.fsync(final.parent)
    return manifest


def _manifest(
    contents: Contents, *, run: RunFingerprint, files: Mapping[str, FileChecksum], index: Mapping[str, Any]
) -> Manifest:
    step, progress = contents.step, contents.progress
    samples = str(progress.get("samples_sha256", ""))
    return Manifest(
        step=step,
        run=run,
        metrics=dict(progress["last_metrics"]) if progress.get("metrics_step") == step else {},
        state_sha256=state_digest(index, scalars=contents.scalars, step=step, samples=samples),
        created=time.time(),
        versions=_versions(),
        files=files,
    )


def _not_finite(step: int, *, names: Sequence[str], newest: Path | None) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"step {step}: {names[0]}{more} is not finite, so no checkpoint was saved. "
        + (f"The last valid one is {newest}." if newest else "There is no earlier one.")
        + " Lower train.learning_rate or set train.max_gradient_norm and restart the run: it resumes from there."
    )


def _versions() -> dict[str, str]:
    return {"finetune": __version__, **{name: version(name) for name in ("torch", "accelerate", "transformers")}}


def require_disk_space(folder: Path, num_bytes: int) -> None:
    """Raise CheckpointError if the folder's disk has no space for one more checkpoint of this size."""
    free, needed = free_bytes(folder), num_bytes + SLACK_BYTES
    if free < needed:
        raise CheckpointError(
            f"{folder}: a checkpoint needs {format_size(needed)}, but {format_size(free)} are free (an old one is "
            "deleted only after the new one was verified). Free disk space, lower checkpoint.keep_last, or set "
            "run.folder to another disk."
        )


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError of writing into a CheckpointError with advice."""
    try:
        yield
    except OSError as error:
        advice = ""
        if error.errno in _FULL:
            advice = (
                f" {format_size(free_bytes(folder))} are free; earlier checkpoints are intact. Free disk space, lower "
                "checkpoint.keep_last, or set run.folder to another disk."
            )
        raise CheckpointError(f"cannot write {folder}: {error}.{advice}") from error
