"""Finds and verifies a checkpoint, and loads single tensors of it, or the whole training state.

No pickle. A rank that loads training state reads only the rows of its own shard.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import (
    Manifest,
    Metadata,
    OtherFormatError,
    RunFingerprint,
    file_checksum,
    files_to_verify,
    first_file_problem,
    header_problem,
    read_manifest_of_step,
    read_metadata,
)
from finetune.checkpoint.format.tensor_file import MODEL_KEYS, PARAMETER, TensorRecord, parse_safetensors, read_range
from finetune.checkpoint.read.changes import check_changes, refuse_existing_checkpoint
from finetune.checkpoint.read.checksum_prefetch import ChecksumOf, ChecksumPrefetch
from finetune.checkpoint.sharding.access import StateAccess
from finetune.checkpoint.sharding.gather import agree_on_records
from finetune.errors import CheckpointError
from finetune.runtime import distributed
from finetune.runtime.distributed import Group, run_on_all_ranks, run_on_rank_0
from finetune.runtime.resources import usable_cores
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


_MAX_LISTED = 8
_MAX_THREADS = 4

CachedBytes = Callable[[Path], np.ndarray | None]
"""Returns the content of a file that is already in memory; None for any other."""


@dataclass(frozen=True)
class OpenCheckpoint:
    """A verified checkpoint whose tensors are read from disk on demand."""

    verified: VerifiedCheckpoint
    records: Mapping[str, TensorRecord]  # by stored name
    progress: Mapping[str, Any]
    scalars: Mapping[str, Any]
    _files: Mapping[str, Path]

    def read(self, stored_name: str) -> Tensor:
        """Return the full tensor, as it was saved."""
        with safe_open(self._files[stored_name], framework="pt", device="cpu") as file:
            tensor: Tensor = file.get_tensor(stored_name)
        record = self.records[stored_name]
        assert tensor.shape == record.shape, f"{stored_name} has the shape {list(tensor.shape)}, not {record.shape}"
        return tensor

    def model_records(self) -> list[TensorRecord]:
        """Return the records of the trained parameters and the buffers, without the optimizer's state."""
        return [record for record in self.records.values() if record.key in MODEL_KEYS]


def open_checkpoint(path: Path) -> OpenCheckpoint:
    """Return the checkpoint in the folder after verifying all its files; raises CheckpointError for a bad one.

    Collective if a process group exists: the files to verify are divided among the ranks.
    """
    verified = verify_checkpoint(path)
    saved = tensor_locations(verified)
    return OpenCheckpoint(
        verified,
        records={name: record for name, (_, record) in saved.items()},
        progress=verified.metadata.progress,
        scalars=verified.metadata.scalars,
        _files={name: file for name, (file, _) in saved.items()},
    )


def tensor_locations(verified: VerifiedCheckpoint) -> dict[str, tuple[Path, TensorRecord]]:
    """Return file and record of each tensor in the index, by stored name."""
    return {
        name: (
            verified.path / entry["file"],
            TensorRecord(name=entry["name"], key=entry["key"], shape=tuple(entry["shape"]), dtype=entry["dtype"]),
        )
        for name, entry in verified.metadata.index.items()
    }


def resume_checkpoint(
    checkpoint: VerifiedCheckpoint,
    *,
    access: StateAccess,
    run: RunFingerprint,
    allow_changes: Sequence[str],
    log: Callable[[str], None],
    checksums: ChecksumPrefetch,
) -> dict[str, Any]:
    """Load the checkpoint into model and optimizer of this run and return its progress. Collective.

    Logs changes since the save; raises CheckpointError for a change that `allow_changes` does not allow.
    """
    saved = checkpoint.manifest.run
    check = partial(check_changes, checkpoint.path, saved, current=run, allowed=allow_changes)
    for message in run_on_rank_0(check):
        log(message)
    progress = load_checkpoint(checkpoint, access=access, cached_bytes=checksums.cached_bytes)
    checksums.clear()
    return progress


def load_checkpoint(
    verified: VerifiedCheckpoint, *, access: StateAccess, cached_bytes: CachedBytes = lambda path: None
) -> dict[str, Any]:
    """Load the verified checkpoint and return its progress; raises CheckpointError for differences. Collective."""
    path = verified.path
    fault_point("load.begin", step=verified.step)
    saved, scalars = tensor_locations(verified), verified.metadata.scalars
    run_on_all_ranks(access.begin_writing)  # not collective: the optimizer creates its state
    expected = agree_on_records(access)
    records = [record for _, record in saved.values()]
    updated = {record.name for record in records if record.part == "optimizer"}
    without_state = {record.name for record in records if record.key == PARAMETER} - updated
    wanted = {
        record.stored_name: record
        for record in expected
        if record.key in MODEL_KEYS or record.name not in without_state
    }
    reshaped = [
        f"{name} ({list(saved[name][1].shape)} in the checkpoint, {list(record.shape)} in this run)"
        for name, record in wanted.items()
        if name in saved and saved[name][1].shape != record.shape
    ]
    differences = {
        "missing from the checkpoint": [name for name in wanted if name not in saved],
        "only in the checkpoint": [name for name in saved if name not in wanted],
        "different shape": reshaped,
    }
    lines = [
        f"  {problem}: {', '.join(names[:_MAX_LISTED])}"
        + (f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else "")
        for problem, names in differences.items()
        if names
    ]
    if lines:
        raise CheckpointError(
            f"{path} does not match the state that this run trains\n" + "\n".join(lines) + "\n"
            "Restore the settings of model, adapter, freezing and optimizer, or write another run.folder to start from "
            "scratch."
        )
    # `finish_writing` is collective: no rank may enter it before all have read their shards without an error.
    run_on_all_ranks(
        lambda: _load_tensors(
            saved, scalars, step=verified.step, without_state=without_state, access=access, cached_bytes=cached_bytes
        )
    )
    access.finish_writing()
    fault_point("load.done", step=verified.step)
    return dict(verified.metadata.progress)


def _load_tensors(
    saved: Mapping[str, tuple[Path, TensorRecord]],
    scalars: Mapping[str, Any],
    *,
    step: int,
    without_state: set[str],
    access: StateAccess,
    cached_bytes: CachedBytes,
) -> None:
    access.discard_state(without_state)
    paths = {path for path, _ in saved.values()}
    cached = {
        path: parse_safetensors(torch.from_numpy(content))
        for path in paths
        if (content := cached_bytes(path)) is not None
    }
    with ExitStack() as stack:
        files: dict[Path, Any] = {
            path: stack.enter_context(safe_open(path, framework="pt", device="cpu")) for path in paths
        }

        def load(location: tuple[Path, TensorRecord]) -> None:
            path, record = location
            fault_point("load.read", step=step, path=path)
            own = access.local_range(record)
            values = cached.get(path, {}).get(record.stored_name)
            if values is not None and access.adopt(record, values):
                return
            rows = read_range(files[path], record, start=own.start * own.width, stop=own.stop * own.width)
            access.write(record, own.of(rows))

        # The page faults of several threads, which allocate the state's memory, overlap.
        num_threads = min(_MAX_THREADS, usable_cores()) if access.device.type == "cpu" else 1
        with ThreadPoolExecutor(num_threads) as threads:
            deque(threads.map(load, saved.values()), maxlen=0)
    access.write_scalars(scalars["optimizer"])
    access.loss_scale.write(scalars["loss_scale"])
