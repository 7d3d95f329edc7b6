"""A prepared set as it is written: chunk after chunk, and after a kill from where its journal says it had come."""

import shutil
import stat
from dataclasses import asdict
from pathlib import Path

import numpy as np

from finetune.data.prepared.chunks import Chunk
from finetune.data.prepared.counts import Counts
from finetune.data.prepared.growing import ArrayNote, GrowingArrays
from finetune.data.prepared.journal import Journal, Noted
from finetune.data.prepared.store import FORMAT_VERSION, MANIFEST, Identity
from finetune.runtime.files import sync
from finetune.runtime.sealed import write_sealed

_OF_EACH_SAMPLE = {"lengths": "<i4", "num_targets": "<i4", "digests": "<u8", "marks": "<u8", "row_numbers": "<i8"}
_BEGUN = {name: ArrayNote(dtype) for name, dtype in _OF_EACH_SAMPLE.items()}


class SetWriter:
    """Writes chunks as a prepared set into a folder in which it may have been begun."""

    def __init__(self, folder: Path, made_of: Identity) -> None:
        self._folder = folder
        self._made_of = made_of
        self._journal = Journal(folder, head=f"{made_of.fingerprint}/{FORMAT_VERSION}")
        self.given_up: str | None = None  # why what another process has begun here is made anew
        noted, self._arrays = self._taken_up()
        self._counts = noted.counts
        self._origins = list(noted.origins)
        self._num_origins_noted = len(self._origins)

    @property
    def counts(self) -> Counts:
        """Return the counts of all rows that are behind it."""
        return self._counts

    def append(self, chunk: Chunk) -> None:
        """Write the samples of the chunk behind those that are there."""
        for name, values in chunk.values.items():
            self._append_values(name, values, lengths=chunk.lengths[name])
        lengths = next(iter(chunk.lengths.values()), np.zeros(0, np.int64)).astype(np.int32)
        each = (lengths, chunk.num_targets, chunk.digests, chunk.marks, chunk.row_numbers)
        for name, of_each in zip(_OF_EACH_SAMPLE, each, strict=True):
            self._arrays.append(name, of_each)
        for first, origin in chunk.origins:
            if not self._origins or self._origins[-1][1] != origin:
                self._origins.append((self._counts.samples + first, origin))
        self._counts = self._counts.plus(chunk.counts)

    def note(self) -> None:
        """Make sure that what is written survives, so that it is not made again."""
        noted = Noted(self._counts, self._arrays.sync(), tuple(self._origins))
        self._journal.note(noted, num_origins_noted=self._num_origins_noted)
        self._num_origins_noted = len(self._origins)

    def count(self, counts: Counts) -> None:
        """Add what no chunk tells."""
        self._counts = self._counts.plus(counts)

    def finish(self) -> Counts:
        """Write what makes the folder a prepared set, and return its counts."""
        arrays = self._arrays.finish()
        manifest = {
            "version": FORMAT_VERSION,
            "fingerprint": self._made_of.fingerprint,
            "names": self._arrays.stems(".values"),
            "counts": asdict(self._counts),
            "origins": self._origins,
            "shards": self._made_of.shards,
            "made_of": dict(self._made_of.parts),
            "arrays": arrays,
        }
        write_sealed(self._folder / MANIFEST, manifest)
        self._journal.remove()
        sync(self._folder)
        return self._counts

    def close(self) -> None:
        """Let go of the files."""
        self._arrays.close()

    def _taken_up(self) -> tuple[Noted, GrowingArrays]:
        """Return the last state noted and the arrays cut back to it; where the files are not as left, an empty one."""
        try:
            _require_files(self._folder)
            noted = self._journal.read()
            if noted.arrays:
                return noted, GrowingArrays(self._folder, noted.arrays)
        except (ValueError, TypeError, KeyError, OSError) as error:
            self.given_up = str(error)
        _empty(self._folder)
        self._journal.remove()
        return Noted(), GrowingArrays(self._folder, _BEGUN)

    def _append_values(self, name: str, values: np.ndarray, *, lengths: np.ndarray) -> None:
        start = self._arrays.length(f"{name}.values")
        if start is None:
            start = 0
            self._arrays.append(f"{name}.offsets", np.zeros(1, np.int64))
        self._arrays.append(f"{name}.values", values)
        self._arrays.append(f"{name}.offsets", start + np.cumsum(lengths, dtype=np.int64))


def _require_files(folder: Path) -> None:
    """Raise ValueError for anything but files of the folder's own: through a link a foreign file would be cut off."""
    for path in folder.iterdir():
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError(f"{path.name} is no file of its own")


def _empty(folder: Path) -> None:
    """Remove all that is in the folder: what is written there next goes through no link that was left."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
