"""Saves a run, finds what it continues from, and loads it."""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.checkpoint import layout
from finetune.checkpoint.find import Found, find_at, find_newest, refuse_any, verify
from finetune.checkpoint.load import read_checkpoint, refuse_other_identity
from finetune.checkpoint.manifest import Manifest
from finetune.checkpoint.retention import removable_steps
from finetune.checkpoint.save import write_checkpoint
from finetune.checkpoint.state import StateAccess
from finetune.checkpoint.together import main_does
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.errors import CheckpointError
from finetune.runtime import ranks


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is whole on disk."""

    path: Path
    size_bytes: int
    seconds: float


class Checkpointer:
    """The checkpoints of one run. Every method is collective, and an error on one rank is raised on all."""

    def __init__(
        self,
        folder: Path,
        *,
        section: CheckpointSection,
        access: StateAccess,
        identity: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._section = section
        self._access = access
        self._identity = dict(identity)
        self._say = say

    def save(self, step: int, *, progress: Mapping[str, Any]) -> SavedCheckpoint:
        """Write the checkpoint of this step, then let go of old ones; one that is there and good stays. Collective."""
        started = time.monotonic()
        manifest = self._already_saved(step) or write_checkpoint(
            self._folder, step, access=self._access, identity=self._identity, progress=progress
        )
        # Other ranks may go on meanwhile: nobody reads what is deleted here, and the new one has been verified.
        if ranks.is_main():
            self._prune(newest_valid=step)
        path = layout.step_folder(self._folder, step)
        return SavedCheckpoint(path, manifest.size_bytes, seconds=time.monotonic() - started)

    def find(self) -> Found | None:
        """Return the checkpoint that `checkpoint.resume` asks for, verified; None to start anew. Collective."""
        if self._section.resume == "never":
            refuse_any(self._folder)
            return None
        if self._section.resume == "auto":
            return find_newest(self._folder, say=self._say)
        return find_at(Path(self._section.resume), folder=self._folder)

    def load(self, found: Found) -> Mapping[str, Any]:
        """Put the checkpoint's state into what is trained and return its progress. Collective."""
        refuse_other_identity(found.path, found.manifest.identity, wanted=self._identity)
        return read_checkpoint(found, access=self._access)

    def _already_saved(self, step: int) -> Manifest | None:
        path = layout.step_folder(self._folder, step)
        if not main_does(path.exists):
            return None
        try:
            return verify(path).manifest
        except CheckpointError as error:
            aside = main_does(lambda: layout.set_aside(path, "bad"))
            if ranks.is_main():
                self._say(f"wrote {path.name} anew; the one before is now {aside.name}: {error}")
            return None

    def _prune(self, *, newest_valid: int) -> None:
        kept = layout.steps(self._folder)
        for step in removable_steps(kept, keep_last=self._section.keep_last, newest_valid=newest_valid):
            try:
                # Renamed first: a folder that is half deleted must not look like a checkpoint.
                shutil.rmtree(layout.set_aside(kept[step], "deleted"))
            except OSError as error:
                self._say(f"could not delete {kept[step]}: {error}")
