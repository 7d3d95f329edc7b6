"""Saves of a run, one at a time: in the background from a copy, or streamed while training waits; with retries."""

import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from finetune.checkpoint.background import run_in_background, run_now
from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import Manifest, OtherFormatError, RunFingerprint
from finetune.checkpoint.read.find import verify_checkpoint
from finetune.checkpoint.sharding.state_access import StateAccess
from finetune.checkpoint.write.retention import prune
from finetune.checkpoint.write.snapshot import Contents, SnapshotSource, StreamingSource
from finetune.checkpoint.write.writer import write_contents
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.errors import CheckpointError, NonFiniteError
from finetune.runtime import distributed
from finetune.runtime.distributed import Group, error_text, run_on_rank_0
from finetune.runtime.supervision.exit import is_broken_collective
from finetune.runtime.supervision.heartbeat import fault_point

RETRY_PAUSES_SECONDS = (1.0, 5.0)
"""Between the attempts to write one checkpoint."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is complete on disk."""

    step: int
    path: Path
    size_bytes: int
    seconds: float  # from the request to the end
    stall_seconds: float  # for which training waited


class Saver:
    """Writes the checkpoints of one run."""

    def __init__(
        self,
        folder: Path,
        *,
        section: CheckpointSection,
        access: StateAccess,
        run: RunFingerprint,
    ) -> None:
        self._folder = folder
        self._section = section
        self._run = run
        self.contents = SnapshotSource(access) if section.asynchronous else StreamingSource(access)
        self._future: Future[SavedCheckpoint] | None = None
        self._notes: deque[tuple[int, str]] = deque()  # appended by the background thread, read by the main one

    def begin(self, step: int, *, progress: Mapping[str, Any]) -> None:
        """Start a checkpoint of this step, after `finish` of the previous one. Collective.

        Training may continue on return. Raises CheckpointError on all ranks if the state could not be captured.
        """
        assert self._future is None, "the previous save was not finished"
        started = time.monotonic()
        fault_point("save.begin", step=step)
        contents = self.contents.capture(step, progress=progress)
        fault_point("save.copied", step=step)
        distributed.open_background_group()  # its timeout allows for slow disks
        if self._section.asynchronous:
            work = partial(self._write, contents, started=started, stall=time.monotonic() - started)
            self._future = run_in_background(work, name=f"checkpoint of step {step}")
        else:
            self._future = run_now(partial(self._write, contents, started=started))

    def outcome(self) -> SavedCheckpoint | BaseException | None:
        """Return the save's result or error on this rank; None while it is running, and if there is none to finish."""
        if self._future is None or not self._future.done():
            return None
        return self._future.exception() or self._future.result()

    def notes(self) -> list[tuple[int, str]]:
        """Return the new warnings about saves, each with the checkpoint's step."""
        return [self._notes.popleft() for _ in range(len(self._notes))]

    def wait(self) -> None:
        """Wait until the running save has ended on this rank."""
        if self._future is not None:
            wait([self._future])

    def finish(self) -> SavedCheckpoint | None:
        """Wait for the running save and return its result. Collective.

        Raises CheckpointError, or NonFiniteError, on all ranks if it failed on one.
        """
        if self._future is None:
            return None
        self.wait()
        outcome, self._future = self.outcome(), None
        _raise_first_failure(outcome)
        assert isinstance(outcome, SavedCheckpoint)
        return outcome

    def _write(self, contents: Contents, *, started: float, stall: float | None = None) -> SavedCheckpoint:
        """Write the contents, with retries; ranks communicate in the background group. Collective."""
        try:
            manifest = self._try(contents)
        except (CheckpointError, NonFiniteError):
            raise
        except Exception as error:  # unexpected, perhaps only on this rank: the others must not wait for it
            traceback.clear_frames(error.__traceback__)  # they keep the process group alive
            distributed.close_background_group()
            raise
        seconds = time.monotonic() - started
        path = layout.step_folder(self._folder, contents.step)
        return SavedCheckpoint(contents.step, path, manifest.size_bytes, seconds, seconds if stall is None else stall)

    def _try(self, contents: Contents) -> Manifest:
        for pause in (*RETRY_PAUSES_SECONDS, None):
            try:
                return self._write_and_prune(contents)
            except CheckpointError as error:
                text = f"the checkpoint of step {contents.step} could not be written"
                if pause is None:
                    raise CheckpointError(f"{text}, {len(RETRY_PAUSES_SECONDS) + 1} times: {error}") from error
                self._notes.append((contents.step, f"{text}; retrying in {pause:g} s: {error}"))
                threading.Event().wait(pause)
        raise AssertionError("the last attempt returns or raises")

    def _write_and_prune(self, contents: Contents) -> Manifest:
        manifest = self._already_saved(contents.step)
        if manifest is None:
            manifest = write_contents(self._folder, contents, run=self._run, group=Group.BACKGROUND)
        # All ranks wait for the deletion, so that they end together and none waits long for rank 0 later.
        delete_old = partial(prune, self._folder, section=self._section, newest=contents.step)
        failures = run_on_rank_0(delete_old, group=Group.BACKGROUND)
        self._notes.extend((contents.step, each) for each in failures)
        return manifest

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


def _raise_first_failure(outcome: object) -> None:
    """Raise on all ranks the error with which one of them failed. Collective."""
    own = outcome if isinstance(outcome, Exception) else None
    failures = [failure for failure in distributed.gather_objects(_Failure.of(own)) if failure is not None]
    if any(not failure.is_agreed for failure in failures):
        distributed.close_background_group()  # on all ranks, so that the next save opens it again
    if failures:
        first = min(failures, key=lambda failure: failure.is_echo)
        raise (NonFiniteError if first.is_nonfinite else CheckpointError)(first.text) from own


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
        where = "" if is_agreed or distributed.world() == 1 else f" (on rank {distributed.rank()})"
        return cls(error_text(error) + where, is_agreed, is_broken_collective(error), isinstance(error, NonFiniteError))
