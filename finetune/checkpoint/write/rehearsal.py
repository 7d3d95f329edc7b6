"""Tries what a save needs before the first step, so that what would fail in hour 20 fails in minute 1."""

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
from finetune.checkpoint.sharding.save_plan import PlannedFile, plan_files
from finetune.checkpoint.sharding.state_access import StateAccess
from finetune.checkpoint.write.disk_space import SLACK_BYTES, explain_disk_errors
from finetune.checkpoint.write.snapshot import SnapshotSource, StreamingSource
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.errors import CheckpointError
from finetune.runtime import distributed
from finetune.runtime.files import atomic
from finetune.runtime.resources import available_bytes, format_size
from finetune.runtime.run_on_ranks import run_on_all_ranks, run_on_rank_0

_VISIBILITY_CHECKS = 10
"""A second apart, at the files of other machines: a network's file system may take a while to show them."""


def rehearse(
    folder: Path,
    *,
    section: CheckpointSection,
    access: StateAccess,
    contents: SnapshotSource | StreamingSource,
    num_saves: int,
) -> None:
    """Try permissions, sharing, space and memory at full size, and gather the parameters once. Collective.

    Raises CheckpointError with the numbers and the remedies where a save of this run would fail.
    """
    access.begin_reading()
    here = agree_on_records(access)
    planned = plan_files(expected_records(here, keys=access.expected_state()), world=distributed.world())
    _try_folder(folder)
    size = sum(record.size_bytes for file in planned for record in file.records)
    run_on_rank_0(partial(require_space_for_saves, folder, size_bytes=size, section=section, num_saves=num_saves))
    if section.asynchronous:
        _require_host_memory(planned)
    contents.rehearse(planned, here=frozenset(here))


def expected_records(existing: Sequence[TensorRecord], *, keys: Sequence[str]) -> list[TensorRecord]:
    """Return the records and those of the state that the optimizer will have made after its first update."""
    updated = {record.name for record in existing if record.part == "optimizer"}
    return [
        each
        for record in existing
        for each in (
            [record, *(replace(record, key=word) for word in keys)]
            if record.key == PARAMETER and record.name not in updated
            else [record]
        )
    ]


def require_space_for_saves(folder: Path, *, size_bytes: int, section: CheckpointSection, num_saves: int) -> None:
    """Raise CheckpointError where the disk will not hold all that is kept at one time of the saves to come."""
    num_kept = section.keep_last + (section.keep_best.count if section.keep_best else 0)
    num_missing = min(max(num_kept + 1 - len(layout.steps(folder)), 1), num_saves)
    needed, free = num_missing * (size_bytes + SLACK_BYTES), shutil.disk_usage(folder).free
    if free < needed:
        s = "" if num_missing == 1 else "s"
        raise CheckpointError(
            f"{folder}: {num_missing} more checkpoint{s} of {format_size(size_bytes)} need {format_size(needed)} (up to "
            f"{num_kept} are kept, and one is written before one is deleted), free are {format_size(free)}. Make room, "
            "lower checkpoint.keep_last, or let run.folder be on another disk. `checkpoint.rehearse: false` tries it "
            "anyway."
        )


def require_host_memory(shares: Sequence[tuple[str, int, int]]) -> None:
    """Raise CheckpointError where a machine has no room for its processes' (machine, share, available bytes) shares."""
    for host in dict.fromkeys(host for host, _, _ in shares):
        mine = [(share, available) for name, share, available in shares if name == host]
        needed, available = sum(share for share, _ in mine), min(available for _, available in mine)
        if needed > available:
            raise CheckpointError(
                f"checkpoint.asynchronous: the copies of {len(mine)} process{'' if len(mine) == 1 else 'es'} on {host} "
                f"need {format_size(needed)} of memory, available are {format_size(available)}. Write "
                "`checkpoint.asynchronous: false`, and training waits while checkpoints are written, or use machines "
                "with more memory, or more of them."
            )


def _require_host_memory(planned: Sequence[PlannedFile]) -> None:
    own = sum(record.size_bytes for file in planned if file.owner == distributed.rank() for record in file.records)
    # All have measured before one takes anything: what is available is gathered before any memory is touched.
    require_host_memory(distributed.gather_objects((platform.node(), own, available_bytes())))


def _try_folder(folder: Path) -> None:
    """Have every rank write and read a file, and rank 0 see all of them, rename and delete. Collective."""
    token = run_on_rank_0(lambda: uuid.uuid4().hex[:8])
    trial = layout.rehearsal_folder(folder, token)
    try:
        hosts = run_on_all_ranks(partial(_write_and_read, trial / f"rank-{distributed.rank()}"))
        # Every rank has written (that is when `run_on_all_ranks` returns) before rank 0 looks.
        run_on_rank_0(partial(_wait_for_files_of_all, trial, dict(enumerate(hosts))))
        run_on_rank_0(partial(_rename_and_delete, trial))
    finally:
        shutil.rmtree(trial, ignore_errors=True)  # also what lies on a machine that does not share the folder


def _write_and_read(path: Path) -> str:
    with explain_disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(path.name.encode())
            file.flush()
            os.fsync(file.fileno())
        if path.read_bytes() != path.name.encode():
            raise CheckpointError(f"{path}: does not hold what was written to it. Suspect the disk.")
    return platform.node()


def _wait_for_files_of_all(trial: Path, hosts: Mapping[int, str]) -> None:
    for _ in range(_VISIBILITY_CHECKS):
        there = {path.name for path in trial.iterdir()}
        missing = [rank for rank in hosts if f"rank-{rank}" not in there]
        if not missing:
            return
        threading.Event().wait(1)
    raise CheckpointError(
        f"{trial.parent}: what rank {missing[0]} writes there on {hosts[missing[0]]} cannot be seen on {hosts[0]}, so "
        "the machines do not share this folder. Let run.folder be on storage that all of them have mounted."
    )


def _rename_and_delete(trial: Path) -> None:
    with explain_disk_errors(trial.parent):
        aside = trial.with_name(f"{trial.name}-renamed")
        trial.rename(aside)
        atomic.fsync(aside.parent)
        shutil.rmtree(aside)
