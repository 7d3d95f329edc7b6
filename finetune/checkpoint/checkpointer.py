"""Saves the checkpoints of a run, finds the one to resume from, and loads it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.checkpoint.read.changes import check_changes
from finetune.checkpoint.read.checksum_prefetch import ChecksumPrefetch
from finetune.checkpoint.read.find import VerifiedCheckpoint, find_at_path, find_newest, refuse_existing_checkpoints
from finetune.checkpoint.read.load import load_checkpoint
from finetune.checkpoint.sharding.state_access import StateAccess
from finetune.checkpoint.write.save_preflight import rehearse
from finetune.checkpoint.write.saver import SavedCheckpoint, Saver
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.runtime.distributed import run_on_rank_0


class Checkpointer:
    """The checkpoints of one run. Every method is collective; an error on one rank is raised on all."""

    def __init__(
        self,
        folder: Path,
        *,
        section: CheckpointSection,
        access: StateAccess,
        run: RunFingerprint,
        log: Callable[[str], None],
        checksums: ChecksumPrefetch | None = None,
    ) -> None:
        """`checksums` are those of files to be verified that were computed in advance."""
        self._folder = folder
        self._section = section
        self._access = access
        self._run = run
        self._log = log
        self._checksums = checksums or ChecksumPrefetch()
        self.saver = Saver(folder, section=section, access=access, run=run)
        self.stops_on_failure = section.on_failure == "stop"

    def rehearse(self, *, num_saves: int) -> None:
        """Check that the remaining saves will succeed, if `checkpoint.rehearse` is set. Collective."""
        if self._section.rehearse:
            contents = self.saver.contents
            rehearse(self._folder, section=self._section, access=self._access, contents=contents, num_saves=num_saves)

    def save(self, step: int, *, progress: Mapping[str, Any]) -> SavedCheckpoint:
        """Write the checkpoint of this step unless a valid one exists, then delete old ones. Collective."""
        self.saver.begin(step, progress=progress)
        try:
            saved = self.saver.finish()
        finally:
            for _, note in self.saver.notes():
                self._log(note)
        assert saved is not None, "it was started"
        return saved

    def find(self) -> VerifiedCheckpoint | None:
        """Return the checkpoint that `checkpoint.resume` asks for, verified; None to start from scratch. Collective."""
        if self._section.resume == "never":
            refuse_existing_checkpoints(self._folder)
            return None
        if self._section.resume == "auto":
            return find_newest(self._folder, log=self._log, checksum_of=self._checksums.checksum)
        return find_at_path(Path(self._section.resume), folder=self._folder, checksum_of=self._checksums.checksum)

    def load(self, found: VerifiedCheckpoint) -> Mapping[str, Any]:
        """Load the checkpoint into model and optimizer and return its progress. Collective.

        Logs what changed since; raises CheckpointError for a change that `allow_changes` does not allow.
        """
        saved, allowed = found.manifest.run, self._section.allow_changes
        for message in run_on_rank_0(lambda: check_changes(found.path, saved, wanted=self._run, allowed=allowed)):
            self._log(message)
        progress = load_checkpoint(found, access=self._access, cached_bytes=self._checksums.cached_bytes)
        self._checksums.clear()
        return progress
