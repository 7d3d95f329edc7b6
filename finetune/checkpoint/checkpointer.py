"""Saves a run, finds what it continues from, and loads it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.checkpoint.read.changes import check_changes
from finetune.checkpoint.read.checksum_prefetch import ChecksumPrefetch
from finetune.checkpoint.read.find import VerifiedCheckpoint, find_at_path, find_newest, refuse_existing_checkpoints
from finetune.checkpoint.read.load import load_checkpoint
from finetune.checkpoint.sharding.state_access import StateAccess
from finetune.checkpoint.write.rehearsal import rehearse
from finetune.checkpoint.write.saver import SavedCheckpoint, Saver
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.runtime.run_on_ranks import run_on_rank_0


class Checkpointer:
    """The checkpoints of one run. Every method is collective, and an error on one rank is raised on all."""

    def __init__(
        self,
        folder: Path,
        *,
        section: CheckpointSection,
        access: StateAccess,
        run: RunFingerprint,
        log: Callable[[str], None],
        ahead: ChecksumPrefetch | None = None,
    ) -> None:
        """`ahead` knows digests of files that are going to be verified."""
        self._folder = folder
        self._section = section
        self._access = access
        self._run = run
        self._log = log
        self._ahead = ahead or ChecksumPrefetch()
        self.saver = Saver(folder, section=section, access=access, run=run)
        self.stops_on_failure = section.on_failure == "stop"

    def rehearse(self, *, num_saves: int) -> None:
        """Try what the saves that are still to come need, where `checkpoint.rehearse` says so. Collective."""
        if self._section.rehearse:
            contents = self.saver.contents
            rehearse(self._folder, section=self._section, access=self._access, contents=contents, num_saves=num_saves)

    def save(self, step: int, *, progress: Mapping[str, Any]) -> SavedCheckpoint:
        """Write the checkpoint of this step, then let go of old ones; one that is there and good stays. Collective."""
        self.saver.begin(step, progress=progress)
        try:
            saved = self.saver.settle()
        finally:
            for _, note in self.saver.notes():
                self._log(note)
        assert saved is not None, "it has been begun"
        return saved

    def find(self) -> VerifiedCheckpoint | None:
        """Return the checkpoint that `checkpoint.resume` asks for, verified; None to start anew. Collective."""
        if self._section.resume == "never":
            refuse_existing_checkpoints(self._folder)
            return None
        if self._section.resume == "auto":
            return find_newest(self._folder, log=self._log, checksum_of=self._ahead.facts)
        return find_at_path(Path(self._section.resume), folder=self._folder, checksum_of=self._ahead.facts)

    def load(self, found: VerifiedCheckpoint) -> Mapping[str, Any]:
        """Put the checkpoint's state into what is trained and return its progress. Collective.

        Says what has changed since; raises CheckpointError where `allow_changes` does not cover it.
        """
        saved, allowed = found.manifest.run, self._section.allow_changes
        for sentence in run_on_rank_0(lambda: check_changes(found.path, saved, wanted=self._run, allowed=allowed)):
            self._log(sentence)
        progress = load_checkpoint(found, access=self._access, cached_bytes=self._ahead.kept)
        self._ahead.forget()
        return progress
