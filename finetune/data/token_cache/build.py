"""Builds a prepared set in a folder, with a file per chunk of rows; an interrupted build is resumed."""

import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np

from finetune.config.sections.data import AuditSection, DataSection
from finetune.data.rows import RawRow
from finetune.data.token_cache.chunks import Chunk, EncoderPool
from finetune.data.token_cache.counts import REMEDY, Counts, exceeded_shares, num_duplicates
from finetune.data.token_cache.integrity import DamagedSet
from finetune.data.token_cache.lengths import LengthLimit
from finetune.data.token_cache.samples import CHUNK_BYTES, ArrayFile, SampleArrays, SampleWriter, chunk_name
from finetune.data.token_cache.store import FORMAT_VERSION, MANIFEST, Identity, TokenCache
from finetune.errors import DataError
from finetune.runtime.files.digests import Damaged, write_json_with_digest
from finetune.runtime.optional import no_op
from finetune.runtime.supervision.heartbeat import fault_point


def refuse_counts(
    counts: Counts, section: DataSection, *, key: str, length: LengthLimit, needs_samples: bool = True
) -> None:
    """Raise DataError with all problems: rows that the section refuses, or no samples left."""
    problems = []
    if counts.long_rows and section.over_length == "refuse":
        problems.append(
            f"{counts.long_rows:,} of {counts.rows:,} rows are longer than {length.limits} "
            f"(the longest has {counts.longest:,} tokens: {counts.longest_place}). "
            f"Set data.over_length: truncate or drop, or {length.advice.format(longest=counts.longest)}."
        )
    if counts.rows_without_target and section.no_target == "refuse":
        cut = ", some of them because they were truncated" if counts.truncated_targets else ""
        problems.append(
            f"{counts.rows_without_target:,} of {counts.rows:,} rows have no target{cut} "
            f"(the first: {counts.first_without_target}). Fix them, or set data.no_target: drop."
        )
    if needs_samples and not problems and counts.samples == 0:
        problems.append(f"no samples are left: {'; '.join(counts.lines())}.")
    if problems:
        raise DataError(f"{key}: " + f"\n{key}: ".join(problems))


def refuse_shares(prepared: TokenCache, section: AuditSection, *, key: str) -> None:
    """Raise DataError with every share of this source that exceeds its limit in `data.audit`."""
    duplicates = 0 if section.max_duplicate_samples is None else sum(num_duplicates([prepared.digests]))
    problems = [f"{share} {REMEDY}" for share in exceeded_shares(prepared.counts, duplicates, section)]
    if problems:
        raise DataError("\n".join(f"{key}: {problem}" for problem in problems))


COLUMNS = {"lengths": "<i4", "num_targets": "<i4", "digests": "<u8", "marks": "<u8", "row_numbers": "<i8"}
"""The dtypes of the columns, which hold one value per sample."""

CHUNKS_PER_FILE = 16
"""Encoded chunks per file: the maximum that is encoded again after a kill."""


class TokenCacheWriter:
    """Writes a prepared set into a folder, continuing after the chunk files of an earlier process."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        self._folder = folder
        self._identity = identity
        self._head = f"{identity.fingerprint}/{FORMAT_VERSION}"
        self.damage: str | None = None  # why the files of an earlier process cannot be used
        chunks = self._intact_chunks()
        names = {chunk_name(number) for number in range(len(chunks))}
        for path in folder.iterdir():
            if path.name not in names:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        self.counts = Counts(**chunks[-1].facts["counts"]) if chunks else Counts()
        self._origins = [(start, origin) for chunk in chunks for start, origin in chunk.facts["origins"]]
        self._num_written_origins = len(self._origins)
        self._writer = SampleWriter(folder, COLUMNS, chunks=chunks)
        self._num_pending = 0

    def append(self, chunk: Chunk) -> None:
        """Append the samples of the next rows, which are written when a file is full."""
        lengths = next(iter(chunk.lengths.values()), np.zeros(0, np.int64)).astype(np.int32)
        columns = (lengths, chunk.num_targets, chunk.digests, chunk.checksums, chunk.row_numbers)
        self._writer.append(SampleArrays(chunk.values, chunk.lengths, dict(zip(COLUMNS, columns, strict=True))))
        for first, origin in chunk.origins:
            if not self._origins or self._origins[-1][1] != origin:
                self._origins.append((self.counts.samples + first, origin))
        self.counts = self.counts.plus(chunk.counts)
        self._num_pending += 1
        if self._num_pending >= CHUNKS_PER_FILE or self._writer.pending_bytes >= CHUNK_BYTES:
            self._write_file()
            fault_point("prepare.saved", step=len(self._writer.chunk_digests))

    def finish(self, *, num_excluded: int = 0) -> Counts:
        """Write the index and the manifest, which complete the set, and return its counts."""
        if self._num_pending:
            self._write_file()
        self.counts = self.counts.plus(Counts(excluded_rows=num_excluded))
        names, files = self._writer.finish()
        manifest = {
            "version": FORMAT_VERSION,
            "fingerprint": self._identity.fingerprint,
            "names": names,
            "counts": asdict(self.counts),
            "origins": self._origins,
            "shards": self._identity.shards,
            "made_of": dict(self._identity.parts),
            "files": files,
        }
        write_json_with_digest(self._folder / MANIFEST, manifest)
        return self.counts

    def _write_file(self) -> None:
        facts = {
            "made_of": self._head,
            "number": len(self._writer.chunk_digests),
            "counts": asdict(self.counts),
            "origins": self._origins[self._num_written_origins :],
        }
        self._writer.write_chunk(facts)
        self._num_written_origins = len(self._origins)
        self._num_pending = 0

    def _intact_chunks(self) -> list[ArrayFile]:
        """Return the chunk files of an earlier process, up to the first damaged or missing one."""
        chunks: list[ArrayFile] = []
        paths = sorted(self._folder.glob("chunk-*"))
        try:
            for number, path in enumerate(paths):
                if path.name != chunk_name(number):
                    raise Damaged(f"{chunk_name(number)} is missing")
                if not stat.S_ISREG(path.lstat().st_mode):
                    raise Damaged(f"{path.name} is not a regular file")
                chunk = ArrayFile(path)
                if (chunk.facts["made_of"], chunk.facts["number"]) != (self._head, number):
                    break  # made from other data or settings
                chunk.verify()
                chunks.append(chunk)
        except Damaged as damage:
            self.damage = str(damage)
        return chunks


def num_written_rows(folder: Path) -> int:
    """Return the number of rows that have been written to this folder so far."""
    with suppress(Damaged, OSError):
        if paths := sorted(folder.glob("chunk-??????.bin")):
            return int(ArrayFile(paths[-1]).facts["counts"]["rows"])
    return 0


OnProgress = Callable[[int], None]
"""Called with the number of rows that are done, including those of an earlier process."""


def build_set(
    folder: Path,
    rows: Iterator[RawRow],
    encoders: EncoderPool,
    identity: Identity,
    *,
    advance: OnProgress = no_op,
    num_left_out: Callable[[], int] = int,
    on_damage: Callable[[str, int], None] = no_op,
) -> Counts:
    """Build a prepared set of the rows in the folder and return its counts.

    `num_left_out` returns, after the last row, the number of rows skipped because they are in the validation set. A
    build with the same identity that was interrupted in this folder is resumed after the written rows, with a bitwise
    identical result; `on_damage` is called with a reason and the first row if written rows must be encoded again.
    Raises DataError for a row that cannot be encoded, OSError for a full disk.
    """
    if (folder / MANIFEST).exists():
        with suppress(DamagedSet):  # intact files of a damaged set are reused below
            prepared = TokenCache(folder)
            prepared.verify()
            return prepared.counts
    writer = TokenCacheWriter(folder, identity)
    num_done = writer.counts.rows
    if writer.damage is not None:
        on_damage(writer.damage, num_done + 1)
    if sum(1 for _ in islice(rows, num_done)) < num_done:
        raise DataError(
            f"the source has changed: it has fewer than the {num_done:,} rows that were already tokenized. Run again."
        )
    advance(num_done)
    for number, chunk in enumerate(encoders.encode(rows), start=1):
        fault_point("prepare.write", step=number)
        writer.append(chunk)
        advance(writer.counts.rows)
    fault_point("prepare.finish", step=writer.counts.rows)
    return writer.finish(num_excluded=num_left_out())
