"""A prepared set is written chunk after chunk into a folder, and resumed where it was interrupted."""

import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np

from finetune.config.sections.data import AuditSection, DataSection
from finetune.data.rows import RawRow
from finetune.data.token_cache.chunks import Chunk
from finetune.data.token_cache.counts import REMEDY, Counts, exceeded_shares, num_duplicates
from finetune.data.token_cache.encoder_pool import EncoderPool
from finetune.data.token_cache.integrity import DamagedSet
from finetune.data.token_cache.journal import AppendableArrays, Journal, JournalState, SyncedArray
from finetune.data.token_cache.lengths import LengthLimit
from finetune.data.token_cache.store import FORMAT_VERSION, MANIFEST, Identity, TokenCache
from finetune.errors import DataError
from finetune.runtime.files.atomic import fsync
from finetune.runtime.files.digests import write_json_with_digest
from finetune.runtime.supervision.heartbeat import fault_point


def refuse_counts(
    counts: Counts, section: DataSection, *, key: str, length: LengthLimit, needs_samples: bool = True
) -> None:
    """Raise DataError with all that must be fixed: rows that the section refuses, or no sample left."""
    problems = []
    if counts.long_rows and section.over_length == "refuse":
        problems.append(
            f"{counts.long_rows:,} of {counts.rows:,} rows are longer than {length.limits} "
            f"(the longest has {counts.longest:,} tokens: {counts.longest_place}). "
            f"Set data.over_length: truncate or drop, or {length.advice(counts.longest)}."
        )
    if counts.rows_without_target and section.no_target == "refuse":
        cut = ", some of them since they were cut" if counts.truncated_targets else ""
        problems.append(
            f"{counts.rows_without_target:,} of {counts.rows:,} rows have no target to learn from{cut} "
            f"(the first: {counts.first_without_target}). Fix them, or set data.no_target: drop."
        )
    if needs_samples and not problems and counts.samples == 0:
        problems.append(f"no sample is left: {'; '.join(counts.lines())}.")
    if problems:
        raise DataError(f"{key}: " + f"\n{key}: ".join(problems))


def refuse_shares(prepared: TokenCache, section: AuditSection, *, key: str) -> None:
    """Raise DataError with every share of this source that is above what `data.audit` allows."""
    twice = 0 if section.max_duplicate_samples is None else sum(num_duplicates([prepared.digests]))
    problems = [f"{share} {REMEDY}" for share in exceeded_shares(prepared.counts, twice, section)]
    if problems:
        raise DataError("\n".join(f"{key}: {problem}" for problem in problems))


_OF_EACH_SAMPLE = {"lengths": "<i4", "num_targets": "<i4", "digests": "<u8", "marks": "<u8", "row_numbers": "<i8"}
_BEGUN = {name: SyncedArray(dtype) for name, dtype in _OF_EACH_SAMPLE.items()}


class TokenCacheWriter:
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
        each = (lengths, chunk.num_targets, chunk.digests, chunk.checksums, chunk.row_numbers)
        for name, of_each in zip(_OF_EACH_SAMPLE, each, strict=True):
            self._arrays.append(name, of_each)
        for first, origin in chunk.origins:
            if not self._origins or self._origins[-1][1] != origin:
                self._origins.append((self._counts.samples + first, origin))
        self._counts = self._counts.plus(chunk.counts)

    def note(self) -> None:
        """Make sure that what is written survives, so that it is not made again."""
        noted = JournalState(self._counts, self._arrays.sync(), tuple(self._origins))
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
        write_json_with_digest(self._folder / MANIFEST, manifest)
        self._journal.remove()
        fsync(self._folder)
        return self._counts

    def close(self) -> None:
        """Let go of the files."""
        self._arrays.close()

    def _taken_up(self) -> tuple[JournalState, AppendableArrays]:
        """Return the last state noted and the arrays cut back to it; where the files are not as left, an empty one."""
        try:
            _require_files(self._folder)
            noted = self._journal.read()
            if noted.arrays:
                return noted, AppendableArrays(self._folder, noted.arrays)
        except (ValueError, TypeError, KeyError, OSError) as error:
            self.given_up = str(error)
        _empty(self._folder)
        self._journal.remove()
        return JournalState(), AppendableArrays(self._folder, _BEGUN)

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


CHUNKS_BETWEEN_NOTES = 16
"""After so many chunks the files are brought to the disk and the journal gets a line: what a kill can cost."""

OnProgress = Callable[[int], None]
"""Told how many rows are behind, whoever has encoded them."""


def ignore_progress(rows: int) -> None:
    """Ignore it."""


def ignore_reason(reason: str) -> None:
    """Ignore it."""


def build_set(
    folder: Path,
    rows: Iterator[RawRow],
    encoders: EncoderPool,
    made_of: Identity,
    *,
    advance: OnProgress = ignore_progress,
    num_left_out: Callable[[], int] = int,
    lost: Callable[[str], None] = ignore_reason,
) -> Counts:
    """Make a prepared set of the rows in the folder and return its counts.

    `num_left_out` tells after the last row how many the source has left out because they are evaluated on. Where a
    build of the same identity was cut off in this folder, it goes on after the rows that its journal names, and the
    result is bitwise identical; `lost` is told why that cannot be, and all is made again. Raises DataError for a row
    that cannot be encoded, OSError for a full disk.
    """
    if (folder / MANIFEST).exists():
        try:
            return _whole(folder)
        except DamagedSet as damage:
            lost(damage.reason)
    writer = TokenCacheWriter(folder, made_of)
    if writer.given_up is not None:
        lost(writer.given_up)
    try:
        _append_rows(writer, _after(rows, writer.counts.rows), encoders, advance=advance)
        fault_point("prepare.finish", step=writer.counts.rows)
        writer.count(Counts(excluded_rows=num_left_out()))
        return writer.finish()
    finally:
        writer.close()


def _whole(folder: Path) -> Counts:
    prepared = TokenCache(folder)
    prepared.verify()
    return prepared.counts


def _append_rows(
    writer: TokenCacheWriter, rows: Iterator[RawRow], encoders: EncoderPool, *, advance: OnProgress
) -> None:
    advance(writer.counts.rows)
    for number, chunk in enumerate(encoders.encode(rows), start=1):
        fault_point("prepare.write", step=number)
        writer.append(chunk)
        if number % CHUNKS_BETWEEN_NOTES == 0:
            writer.note()
            fault_point("prepare.noted", step=number // CHUNKS_BETWEEN_NOTES)
        advance(writer.counts.rows)


def _after(rows: Iterator[RawRow], num_done: int) -> Iterator[RawRow]:
    """Return the rows behind those that are done."""
    if sum(1 for _ in islice(rows, num_done)) < num_done:
        raise DataError(
            f"the source has changed: it has fewer rows than the {num_done:,} that were already tokenised. Start again."
        )
    return rows
