"""Saves of a run, one at a time: in the background from a copy, or streamed while training waits; with retries.

A preflight before the first step checks that saves will succeed.
"""

import os
import platform
import shutil
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import Manifest, OtherFormatError, RunFingerprint
from finetune.checkpoint.format.tensor_file import PARAMETER
from finetune.checkpoint.read.load import verify_checkpoint
from finetune.checkpoint.sharding.access import StateAccess
from finetune.checkpoint.sharding.gather import agree_on_records, plan_files
from finetune.checkpoint.write.retention import prune_checkpoints
from finetune.checkpoint.write.writer import (
    SLACK_BYTES,
    Contents,
    StateSource,
    explain_disk_errors,
    host_memory_bytes,
    write_contents,
)
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.errors import CheckpointError, NonFiniteError
from finetune.runtime import distributed
from finetune.runtime.distributed import Group, error_text, run_on_all_ranks, run_on_rank_0
from finetune.runtime.files import atomic
from finetune.runtime.optional import no_op
from finetune.runtime.progress import Progress
from finetune.runtime.resources import available_bytes, format_size
from finetune.runtime.supervision.exit import is_broken_collective
from finetune.runtime.supervision.heartbeat import fault_point

RETRY_PAUSES_SECONDS = (1.0, 5.0)
"""Pauses between attempts to write a checkpoint."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is complete on disk."""

    step: int
    path: Path
    size_bytes: int
    seconds: float  # from the request to the end
    stall_seconds: float  # during which training waited


class Saver:
    """Saves the checkpoints of one run, and reports the outcome of each."""

    def __init__(
        self,
        folder: Path,
        *,
        section: CheckpointSection,
        access: StateAccess,
        run: RunFingerprint,
        on_saved: Callable[[SavedCheckpoint], None],
        warn: Callable[[int, str], object],
        before_save: Callable[[], None] = no_op,
    ) -> None:
        """`on_saved` and `warn`, which gets a step and a message, are called in the main thread.

        `before_save` is called on every rank before the state is read, and may be collective.
        """
        self._folder = folder
        self._section = section
        self._access = access
        self._run = run
        self._on_saved = on_saved
        self._warn = warn
        self._before_save = before_save
        self._contents = StateSource(access, copies=section.asynchronous)
        self._stops_on_failure = section.on_failure == "stop"
        self._step = 0  # of the last save that was started
        self._future: Future[SavedCheckpoint] | None = None
        self._notes: deque[tuple[int, str]] = deque()  # appended by the background thread, read by the main one
        self._reported: object = None  # the last outcome that was reported

    def rehearse(self, *, num_saves: int) -> None:
        """Check that the remaining saves will succeed, if `checkpoint.rehearse` is set. Collective."""
        if self._section.rehearse:
            section, access, contents = self._section, self._access, self._contents
            rehearse_save(self._folder, section=section, access=access, contents=contents, num_saves=num_saves)

    def __call__(self, progress: Progress) -> None:
        """Save a checkpoint of this progress, in the background if so configured; wait for the previous one.

        A valid checkpoint of the step is kept. Raises CheckpointError if either save has failed and the run stops on
        failures, and NonFiniteError in any case. Collective.
        """
        self.wait_for_writes()
        self._before_save()
        self._step = progress.step
        try:
            self._begin(progress)
        except CheckpointError as error:
            if self._stops_on_failure:
                raise
            self._warn_of_failure(error)
        if self._outcome() is not None:  # it was written in the foreground
            self.wait_for_writes()

    @property
    def has_failed(self) -> bool:
        """Return whether a save has failed on this rank and the run stops because of it."""
        outcome = self._outcome()
        run_continues = isinstance(outcome, CheckpointError) and not self._stops_on_failure
        return isinstance(outcome, BaseException) and not run_continues

    def report_written(self) -> None:
        """Report background saves that have ended since the last call."""
        for _ in range(len(self._notes)):
            self._warn(*self._notes.popleft())
        outcome = self._outcome()
        if outcome is None or outcome is self._reported:
            return
        self._reported = outcome
        if isinstance(outcome, SavedCheckpoint):
            self._on_saved(outcome)
        if isinstance(outcome, CheckpointError) and not self._stops_on_failure:
            self._warn_of_failure(outcome)

    def wait_for_writes(self) -> None:
        """Wait for the save in progress; raises CheckpointError if it failed and failures stop the run. Collective."""
        if self._future is not None:
            wait([self._future])
        self.report_written()
        outcome, self._future = self._outcome(), None
        if outcome is None:
            return
        own = outcome if isinstance(outcome, Exception) else None
        failures = [failure for failure in distributed.gather_objects(_Failure.of(own)) if failure is not None]
        if any(not failure.is_agreed for failure in failures):
            distributed.close_background_group()  # on all ranks, so that the next save opens it again
        try:
            if failures:
                first = min(failures, key=lambda failure: failure.is_echo)
                raise (NonFiniteError if first.is_nonfinite else CheckpointError)(first.text) from own
        except CheckpointError as error:
            if self._stops_on_failure:
                raise
            if not isinstance(self._reported, CheckpointError):  # it failed only on another rank
                self._warn_of_failure(error)

    def _begin(self, progress: Progress) -> None:
        """Capture the state and start to write it; raises CheckpointError on all ranks if that fails.

        Collective.
        """
        started, step = time.monotonic(), progress.step
        fault_point("save.begin", step=step)
        contents = self._contents.capture(step, progress=progress.state_dict())
        fault_point("save.copied", step=step)
        distributed.open_group(distributed.Group.BACKGROUND)  # its timeout allows for slow disks
        future: Future[SavedCheckpoint] = Future()
        self._future = future
        if self._section.asynchronous:
            work = partial(self._write, future, contents, started=started, stall=time.monotonic() - started)
            threading.Thread(target=work, name=f"checkpoint of step {step}", daemon=True).start()
        else:
            self._write(future, contents, started=started)

    def _outcome(self) -> SavedCheckpoint | BaseException | None:
        """Return the result or error of the current save on this rank; None while it runs, and if there is none."""
        if self._future is None or not self._future.done():
            return None
        return self._future.exception() or self._future.result()

    def _warn_of_failure(self, error: CheckpointError) -> None:
        self._warn(self._step, f"{error} Training continues with the next save.")

    def _write(
        self, future: Future[SavedCheckpoint], contents: Contents, *, started: float, stall: float | None = None
    ) -> None:
        """Write the contents and complete the future with the result, or with the error that is raised when it is read.

        Ranks communicate in the background group. The end of the process does not wait for it. Collective.
        """
        try:
            manifest = self._try(contents)
        except Exception as error:
            if not isinstance(error, CheckpointError | NonFiniteError):
                # Perhaps only on this rank: the others must not wait for it.
                traceback.clear_frames(error.__traceback__)  # they keep the process group alive
                distributed.close_background_group()
            future.set_exception(error)
            return
        path, seconds = layout.step_folder(self._folder, contents.step), time.monotonic() - started
        stalled = seconds if stall is None else stall
        future.set_result(SavedCheckpoint(contents.step, path, manifest.size_bytes, seconds, stalled))

    def _try(self, contents: Contents) -> Manifest:
        """Write the contents, with retries, and delete old checkpoints. Collective."""
        for pause in (*RETRY_PAUSES_SECONDS, None):
            try:
                manifest = self._already_saved(contents.step)
                if manifest is None:
                    manifest = write_contents(self._folder, contents, run=self._run, group=Group.BACKGROUND)
                # All ranks wait for the deletion, so that they end together and none waits long for rank 0 later.
                delete_old = partial(prune_checkpoints, self._folder, section=self._section, newest=contents.step)
                failures = run_on_rank_0(delete_old, group=Group.BACKGROUND)
                self._notes.extend((contents.step, failure) for failure in failures)
                return manifest
            except CheckpointError as error:
                text = f"the checkpoint of step {contents.step} could not be written"
                if pause is None:
                    raise CheckpointError(f"{text}, {len(RETRY_PAUSES_SECONDS) + 1} times: {error}") from error
                self._notes.append((contents.step, f"{text}; retrying in {pause:g} s: {error}"))
                threading.Event().wait(pause)
        raise AssertionError("the last attempt returns or raises")

    def _already_saved(self, step: int) -> Manifest | None:
        path = layout.step_folder(self._folder, step)
        if not run_on_rank_0(lambda: os.path.lexists(path), group=Group.BACKGROUND):  # also true for a broken link
            return None
        try:
            return verify_checkpoint(path, group=Group.BACKGROUND).manifest
        except OtherFormatError:
            raise
        except CheckpointError as error:
            aside = run_on_rank_0(partial(layout.rename_aside, path, "bad"), group=Group.BACKGROUND)
            self._notes.append((step, f"replaced {path.name}; the damaged one was renamed to {aside.name}: {error}"))
            return None


@dataclass(frozen=True)
class _Failure:
    """The failure of a save on one rank."""

    text: str
    is_agreed: bool  # all ranks failed with it
    is_echo: bool  # caused by another rank, which closed the group
    is_nonfinite: bool

    @classmethod
    def of(cls, error: Exception | None) -> "_Failure | None":
        if error is None:
            return None
        is_agreed = isinstance(error, CheckpointError | NonFiniteError)
        suffix = "" if is_agreed or distributed.world() == 1 else f" (on rank {distributed.rank()})"
        return cls(
            error_text(error) + suffix, is_agreed, is_broken_collective(error), isinstance(error, NonFiniteError)
        )


_VISIBILITY_CHECKS = 10
"""One second apart: a network file system may show the files of other machines with a delay."""


def rehearse_save(
    folder: Path,
    *,
    section: CheckpointSection,
    access: StateAccess,
    contents: StateSource,
    num_saves: int,
) -> None:
    """Check permissions, shared storage, disk space and memory at full size, and gather the state once. Collective.

    Raises CheckpointError with the amounts and what to do if a save of this run would fail.
    """
    access.begin_reading()
    existing = agree_on_records(access)
    # Includes the state that the optimizer's first update will create.
    keys, updated = access.expected_state_keys(), {record.name for record in existing if record.part == "optimizer"}
    expected = []
    for record in existing:
        expected.append(record)
        if record.key == PARAMETER and record.name not in updated:
            expected += [replace(record, key=key) for key in keys]
    planned = plan_files(expected, world=distributed.world())
    _try_folder(folder)
    size = sum(file.size_bytes for file in planned)
    run_on_rank_0(partial(require_space_for_saves, folder, size_bytes=size, section=section, num_saves=num_saves))
    if section.asynchronous:
        # Gathered before any rank allocates, so that all ranks measure the same state.
        own = (platform.node(), host_memory_bytes(planned), available_bytes())
        require_host_memory(distributed.gather_objects(own))
    contents.rehearse(planned, existing=frozenset(existing))


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
    trial = folder / f"{layout.STAGING}rehearsal-{run_on_rank_0(lambda: uuid.uuid4().hex[:8])}"
    path = trial / f"rank-{distributed.rank()}"

    def write_and_read() -> str:
        with explain_disk_errors(trial):
            trial.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.write(path.name.encode())
                file.flush()
                os.fsync(file.fileno())
            if path.read_bytes() != path.name.encode():
                raise CheckpointError(f"{path}: its content differs from the written data. Check the disk.")
        return platform.node()

    def wait_for_files_of_all() -> None:
        for _ in range(_VISIBILITY_CHECKS):
            visible = {file.name for file in trial.iterdir()}
            missing = [rank for rank in range(len(hosts)) if f"rank-{rank}" not in visible]
            if not missing:
                return
            threading.Event().wait(1)
        raise CheckpointError(
            f"{folder}: a file written by rank {missing[0]} on {hosts[missing[0]]} is not visible on {hosts[0]}, so "
            "the machines do not share this folder. Set run.folder to storage that is mounted on all machines."
        )

    def rename_and_delete() -> None:
        with explain_disk_errors(folder):
            aside = trial.with_name(f"{trial.name}-renamed")
            trial.rename(aside)
            atomic.fsync(folder)
            shutil.rmtree(aside)

    try:
        hosts = run_on_all_ranks(write_and_read)
        run_on_rank_0(wait_for_files_of_all)  # every rank has written when `run_on_all_ranks` returns
        run_on_rank_0(rename_and_delete)
    finally:
        shutil.rmtree(trial, ignore_errors=True)  # on every rank, since the folder may not be shared
