"""Writes one checkpoint: staged, verified, with its manifest last, and renamed, so it appears atomically.

Its contents are copied to host memory first, or gathered while they are written and training waits.
"""

import errno
import mmap
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune import __version__
from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import (
    FileChecksum,
    Manifest,
    RunFingerprint,
    file_checksum,
    first_file_problem,
    state_digest,
    write_manifest,
)
from finetune.checkpoint.format.tensor_file import BUFFER, DTYPES, TensorFile, TensorRecord
from finetune.checkpoint.sharding.access import StateAccess
from finetune.checkpoint.sharding.gather import (
    Gathered,
    Gatherer,
    PlannedFile,
    agree_on_records,
    agree_on_scalars,
    plan_files,
)
from finetune.errors import CheckpointError, NonFiniteError
from finetune.runtime import distributed
from finetune.runtime.distributed import Group, run_on_all_ranks, run_on_rank_0
from finetune.runtime.files import atomic
from finetune.runtime.parameters import is_finite
from finetune.runtime.resources import format_size, free_bytes
from finetune.runtime.run_folder import require_newest_attempt
from finetune.runtime.supervision.heartbeat import fault_point

PAGE_BYTES = mmap.PAGESIZE

Register = Callable[[int, int], None]
"""Page-locks this number of bytes at an address; raises CheckpointError if the driver refuses."""


def pinned_size(size_bytes: int) -> int:
    """Return the memory of a buffer of this size: whole pages; only its own are locked.

    >>> pinned_size(1) // PAGE_BYTES, pinned_size(8 * PAGE_BYTES) // PAGE_BYTES
    (2, 9)
    """
    return _whole_pages(size_bytes) + PAGE_BYTES


class PinnedMemory:
    """A flat buffer of bytes, zeroed and page-locked; deleting this object unlocks it."""

    def __init__(
        self, size_bytes: int, *, register: Register | None = None, unregister: Callable[[int], None] | None = None
    ) -> None:
        """`register` and `unregister` are the CUDA driver's by default."""
        locked_bytes = _whole_pages(size_bytes)
        memory = torch.empty(pinned_size(size_bytes), dtype=torch.uint8)
        start = -memory.data_ptr() % PAGE_BYTES
        # Zeroed first, since registering would commit the pages in a single thread.
        self.bytes: Tensor = memory[start : start + locked_bytes].zero_()[:size_bytes]
        address = self.bytes.data_ptr()
        (register or _register)(address, locked_bytes)
        unlock = unregister or torch.cuda.cudart().cudaHostUnregister  # type: ignore[no-untyped-call]
        # The call holds a reference to the memory until it is unlocked.
        weakref.finalize(self, lambda memory: unlock(address), memory)


def _whole_pages(size_bytes: int) -> int:
    return max(1, -(-size_bytes // PAGE_BYTES)) * PAGE_BYTES


def _register(address: int, size_bytes: int) -> None:
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(driver.cudaHostRegister(address, size_bytes, 0))
    if code:
        raise CheckpointError(
            f"checkpoint.asynchronous: the driver cannot page-lock {format_size(size_bytes)} of memory for the copies"
            f" (CUDA error {code}). Write `checkpoint.asynchronous: false`, so that training waits while checkpoints "
            "are written, or raise the limit of locked memory (`ulimit -l`)."
        )


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint."""

    step: int
    planned: Sequence[PlannedFile]
    tensors: Callable[[], Iterator[Gathered]]  # that this rank writes, in file order; called for every attempt
    scalars: Mapping[str, Any]  # `optimizer` and `loss_scale`
    progress: Mapping[str, Any]


class StateSource:
    """The contents of a run's checkpoints: copied to host memory, or gathered while they are written.

    For copies, each rank allocates buffers once and reuses them. Without, memory for one tensor at a time is enough,
    but training waits.
    """

    def __init__(self, access: StateAccess, *, copies: bool) -> None:
        self._access = access
        self._copies = copies
        self._gatherer = Gatherer(access)
        self._planned: Sequence[PlannedFile] = ()
        self._buffers: dict[str, Tensor] = {}
        self._pinned: list[PinnedMemory] = []

    def capture(self, step: int, *, progress: Mapping[str, Any]) -> Contents:
        """Return the state: a copy, valid until the next one is captured, or as it is when its tensors are iterated.

        Iterating is then collective. Raises CheckpointError on all ranks if one is out of memory. Collective.
        """
        self._access.begin_reading()
        planned = plan_files(agree_on_records(self._access), world=distributed.world())
        tensors = partial(self._gatherer.gather, planned, buffer_for=self._buffer)
        if self._copies:
            # No rank sends before every receiver has allocated its buffers.
            run_on_all_ranks(partial(self._allocate, planned))
            mine = list(tensors())
            tensors = partial(iter, mine)
        scalars = {"optimizer": agree_on_scalars(self._access), "loss_scale": self._access.loss_scale.read()}
        return Contents(step, planned, tensors, scalars, deepcopy(dict(progress)))

    def rehearse(self, planned: Sequence[PlannedFile], *, existing: frozenset[TensorRecord]) -> None:
        """Allocate the buffers of all planned tensors, and gather the existing ones. Collective."""
        if self._copies:
            run_on_all_ranks(partial(self._allocate, planned))
        files = [replace(file, records=tuple(filter(existing.__contains__, file.records))) for file in planned]
        for _ in self._gatherer.gather(files, buffer_for=self._buffer):
            pass

    def _allocate(self, planned: Sequence[PlannedFile]) -> None:
        """Allocate the buffers of this rank's share, unless the plan is the same as for the last save."""
        if planned == self._planned:
            return
        self._planned, self._buffers, self._pinned = (), {}, []  # freed before new memory is allocated
        pins = self._access.device.type == "cuda"  # a GPU copies several times faster to pinned memory
        for file in planned:
            if file.writer == distributed.rank():
                if pins:
                    self._pinned.append(PinnedMemory(file.size_bytes))
                    memory = self._pinned[-1].bytes
                else:
                    memory = torch.empty(file.size_bytes, dtype=torch.uint8).zero_()  # commits its pages
                start = 0
                for record in file.records:  # wide dtypes first, so every tensor is aligned to its element size
                    values = memory[start : start + record.size_bytes]
                    self._buffers[record.stored_name] = values.view(DTYPES[record.dtype])
                    start += record.size_bytes
        self._planned = planned

    def _buffer(self, file: PlannedFile, record: TensorRecord) -> Tensor:
        if self._copies:
            return self._buffers[record.stored_name]
        return torch.empty(record.num_elements, dtype=DTYPES[record.dtype])


def host_memory_bytes(planned: Sequence[PlannedFile]) -> int:
    """Return the host memory of this rank's copies."""
    return sum(pinned_size(file.size_bytes) for file in planned if file.writer == distributed.rank())


SLACK_BYTES = 16 << 20
"""Upper bound of the files of a checkpoint without its tensors."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RECORDED_PACKAGES = ("torch", "accelerate", "transformers")


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
        path = self._staging / file.name
        try:
            with explain_disk_errors(self._staging):
                if file.name not in self._open:
                    path.parent.mkdir(exist_ok=True)
                    self._open[file.name] = TensorFile(path, file.records)
                fault_point("save.write", step=self._step, path=path)
                self._written.tensors[record.stored_name] = self._open[file.name].add(tensor)
                if record.key != BUFFER and not is_finite(tensor):
                    self._written.not_finite.append(record.stored_name)
        except Exception as error:  # raised by `close`, on every rank
            self._failure = error

    def close(self) -> WrittenFiles:
        """Fsync the files, verify them by reading them back and return their checksums; raises the first failure."""
        if self._failure is not None:
            for file in self._open.values():
                file.abandon()
            raise self._failure
        with explain_disk_errors(self._staging):
            files = self._written.files
            for name, file in self._open.items():
                files[name] = file.close()
            for name in files:
                problem = first_file_problem(self._staging, files, [name])
                if problem is not None:
                    raise CheckpointError(f"{self._staging}: {problem}, right after it was written. Check the disk.")
                fault_point("save.written", step=self._step, path=self._staging / name)
        return self._written


def write_contents(folder: Path, contents: Contents, *, run: RunFingerprint, group: Group = Group.HOST) -> Manifest:
    """Write the contents as a checkpoint in `folder` and return its manifest; a failure leaves nothing.

    Raises CheckpointError if it cannot be written, NonFiniteError if a tensor is not finite. Collective.
    """
    staging = layout.staging_folder(folder, contents.step)
    # No rank writes before the folder exists and leftovers of earlier saves are removed.
    num_bytes = sum(file.size_bytes for file in contents.planned)  # of all ranks
    run_on_rank_0(partial(_stage, staging, num_bytes=num_bytes), group=group)
    try:
        writer = RankWriter(staging, step=contents.step)
        for file, record, tensor in contents.tensors():
            writer.add(file, record, tensor)
            del tensor  # freed before the next ones are gathered
        written = WrittenFiles.merge(run_on_all_ranks(writer.close, group=group))
        if written.not_finite:
            newest = run_on_rank_0(partial(layout.newest_checkpoint, folder), group=group)
            first, more = written.not_finite[0], len(written.not_finite) - 1
            raise NonFiniteError(
                f"step {contents.step}: {first}{f' and {more} more' if more else ''} is not finite, so no checkpoint "
                f"was saved. {f'The last valid one is {newest}.' if newest else 'There is no earlier one.'} Lower "
                "train.learning_rate or set train.max_gradient_norm and restart the run: it resumes from there."
            )
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
        step, progress = contents.step, contents.progress
        samples = str(progress.get("samples_sha256", ""))
        manifest = Manifest(
            step=step,
            run=run,
            metrics=dict(progress["last_metrics"]) if progress.get("metrics_step") == step else {},
            state_sha256=state_digest(index, scalars=contents.scalars, step=step, samples=samples),
            created=time.time(),
            versions={"finetune": __version__} | {name: version(name) for name in _RECORDED_PACKAGES},
            files={**checksums, **written.files},
        )
        for folder in {(staging / name).parent for name in manifest.files}:
            atomic.fsync(folder)
        fault_point("save.manifest", step=contents.step)
        write_manifest(staging, manifest)
        fault_point("save.rename", step=contents.step)
        require_newest_attempt()
        staging.rename(final)
        atomic.fsync(final.parent)
    return manifest


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
