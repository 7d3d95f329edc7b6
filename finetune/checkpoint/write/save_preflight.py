"""Checks the requirements of a save before the first step, so that a run fails in minute 1 instead of hour 20."""

import os
import platform
import shutil
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.tensor_file import PARAMETER, TensorRecord
from finetune.checkpoint.sharding.gather import agree_on_records
from finetune.checkpoint.sharding.save_plan import plan_files
from finetune.checkpoint.sharding.state_access import StateAccess
from finetune.checkpoint.write.snapshot import SnapshotSource, StreamingSource, host_memory_bytes
from finetune.checkpoint.write.writer import SLACK_BYTES, explain_disk_errors
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.errors import CheckpointError
from finetune.runtime import distributed
from finetune.runtime.distributed import run_on_all_ranks, run_on_rank_0
from finetune.runtime.files import atomic
from finetune.runtime.resources import available_bytes, format_size

_VISIBILITY_CHECKS = 10
"""One second apart: a network file system may show the files of other machines with a delay."""


def rehearse(
    folder: Path,
    *,
    section: CheckpointSection,
    access: StateAccess,
    contents: SnapshotSource | StreamingSource,
    num_saves: int,
) -> None:
    """Check permissions, shared storage, disk space and memory at full size, and gather the state once. Collective.

    Raises CheckpointError with the amounts and what to do if a save of this run would fail.
    """
    access.begin_reading()
    existing = agree_on_records(access)
    planned = plan_files(expected_records(existing, keys=access.expected_state_keys()), world=distributed.world())
    _try_folder(folder)
    size = sum(record.size_bytes for file in planned for record in file.records)
    run_on_rank_0(partial(require_space_for_saves, folder, size_bytes=size, section=section, num_saves=num_saves))
    if section.asynchronous:
        # Gathered before any rank allocates, so that all ranks measure the same state.
        own = (platform.node(), host_memory_bytes(planned), available_bytes())
        require_host_memory(distributed.gather_objects(own))
    contents.rehearse(planned, existing=frozenset(existing))


def expected_records(existing: Sequence[TensorRecord], *, keys: Sequence[str]) -> list[TensorRecord]:
    """Return the records together with those of the state that the optimizer's first update will create."""
    updated = {record.name for record in existing if record.part == "optimizer"}
    records = []
    for record in existing:
        records.append(record)
        if record.key == PARAMETER and record.name not in updated:
            records += [replace(record, key=key) for key in keys]
    return records


def require_space_for_saves(folder: Path, *, size_bytes: int, section: CheckpointSection, num_saves: int) -> None:
    """Raise CheckpointError if the disk has no space for all future checkpoints that exist at the same time."""
    num_kept = section.keep_last + (section.keep_best.count if section.keep_best else 0)
    num_missing = min(max(num_kept + 1 - len(layout.steps(folder)), 1), num_saves)
    needed, free = num_missing * (size_bytes + SLACK_BYTES), shutil.disk_usage(folder).free
    if free < needed:
        s = "" if num_missing == 1 else "s"
        raise CheckpointError(
            f"{folder}: {num_missing} more checkpoint{s} of {format_size(size_bytes)} need {format_size(needed)} (up "
            f"to {num_kept} are kept, and a new one is written before an old one is deleted), but {format_size(free)} "
            "are free. Free disk space, lower checkpoint.keep_last, or set run.folder to another disk. "
            "`checkpoint.rehearse: false` skips this check."
        )


def require_host_memory(shares: Sequence[tuple[str, int, int]]) -> None:
    """Raise CheckpointError if the copies, as (machine, bytes, available bytes) per process, do not fit into memory."""
    for host in dict.fromkeys(host for host, _, _ in shares):
        local = [(share, available) for name, share, available in shares if name == host]
        needed, available = sum(share for share, _ in local), min(available for _, available in local)
        if needed > available:
            raise CheckpointError(
                f"checkpoint.asynchronous: the copies of {len(local)} process{'' if len(local) == 1 else 'es'} on "
                f"{host} need {format_size(needed)} of memory, but {format_size(available)} are available. Write "
                "`checkpoint.asynchronous: false`, so that training waits while checkpoints are written, or use "
                "machines with more memory, or more machines."
            )


def _try_folder(folder: Path) -> None:
    """Write and read a file on every rank, and find, rename and delete all of them on rank 0. Collective."""
    token = run_on_rank_0(lambda: uuid.uuid4().hex[:8])
    trial = layout.rehearsal_folder(folder, token)
    try:
        hosts = run_on_all_ranks(partial(_write_and_read, trial / f"rank-{distributed.rank()}"))
        # Every rank has written when `run_on_all_ranks` returns.
        run_on_rank_0(partial(_wait_for_files_of_all, trial, dict(enumerate(hosts))))
        run_on_rank_0(partial(_rename_and_delete, trial))
    finally:
        shutil.rmtree(trial, ignore_errors=True)  # on every rank, since the folder may not be shared


def _write_and_read(path: Path) -> str:
    with explain_disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(path.name.encode())
            file.flush()
            os.fsync(file.fileno())
        if path.read_bytes() != path.name.encode():
            raise CheckpointError(f"{path}: its content differs from the written data. Check the disk.")
    return platform.node()


def _wait_for_files_of_all(trial: Path, hosts: Mapping[int, str]) -> None:
    for _ in range(_VISIBILITY_CHECKS):
        visible = {path.name for path in trial.iterdir()}
        missing = [rank for rank in hosts if f"rank-{rank}" not in visible]
        if not missing:
            return
        threading.Event().wait(1)
    raise CheckpointError(
        f"{trial.parent}: a file written by rank {missing[0]} on {hosts[missing[0]]} is not visible on {hosts[0]}, so "
        "the machines do not share this folder. Set run.folder to storage that is mounted on all machines."
    )


def _rename_and_delete(trial: Path) -> None:
    with explain_disk_errors(trial.parent):
        aside = trial.with_name(f"{trial.name}-renamed")
        trial.rename(aside)
        atomic.fsync(aside.parent)
        shutil.rmtree(aside)
