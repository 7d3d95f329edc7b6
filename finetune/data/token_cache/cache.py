"""The cache of prepared sets, keyed by content: one process builds a set while others wait for its lock file.

An interrupted build is resumed. A set is verified when it is opened; a damaged one is quarantined and rebuilt.
"""

import hashlib
import json
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from finetune.config.sections.data import AuditSection, DataSection
from finetune.data.loader import num_prepare_workers
from finetune.data.rows import RawRow
from finetune.data.sources.source import Source
from finetune.data.token_cache.chunks import EncodedChunk, EncoderPool, Encoding, WorkersLost
from finetune.data.token_cache.counts import REMEDY, Counts, exceeded_shares, num_duplicates
from finetune.data.token_cache.integrity import DamagedSet, quarantine_set
from finetune.data.token_cache.samples import CHUNK_BYTES, ArrayFile, SampleArrays, SampleWriter, chunk_name
from finetune.data.token_cache.store import CACHE_VERSION, MANIFEST, Identity, TokenCache
from finetune.errors import DataError
from finetune.runtime.files.atomic import build_once
from finetune.runtime.files.digests import Damaged, write_json_with_digest
from finetune.runtime.optional import no_op
from finetune.runtime.supervision.heartbeat import fault_point

VERIFIED_AT_ONCE_BYTES = 256 << 20
"""Sets up to this size are verified before use, which takes well under a second. Of any set, each sample is verified
before a step uses it."""

_MAX_ATTEMPTS = 3

Log = Callable[[str], None]

OnProgress = Callable[[int], None]
"""Called with the number of finished rows, including rows of an earlier process."""


def open_verified(
    folder: Path, build: Callable[[], bool], *, identity: Identity, key: str, log: Log
) -> tuple[TokenCache, bool]:
    """Return the set, and whether `build` has just built it; raises DataError if it is damaged repeatedly.

    `build` builds the folder unless it exists.
    """
    for _ in range(_MAX_ATTEMPTS):
        is_new = build()
        try:
            prepared = _open(folder, identity)
        except DamagedSet as damage:
            last_damage: DamagedSet = damage
            quarantined = quarantine_set(folder, partial(_is_damaged, folder, identity), log=log)
            if quarantined is not None:
                log(f"warning: {key}: {damage}. It is renamed to {quarantined.name} and rebuilt.")
            continue
        if copies := sorted(folder.parent.glob(f".damaged-{folder.name}-*")):
            log(
                f"warning: {key}: its prepared set was damaged and has been rebuilt; the damaged one is kept as "
                f"{', '.join(map(str, copies))}. Check the disk and the memory of this machine, then delete it."
            )
        return prepared, is_new
    raise DataError(
        f"{key}: {last_damage}, and the rebuilt sets were damaged, too. Check the disk and the memory of this machine, "
        f"or set data.cache_folder to another disk."
    )


def _open(folder: Path, identity: Identity) -> TokenCache:
    prepared = TokenCache(folder, shards=identity.shards)
    if prepared.fingerprint != identity.fingerprint:
        raise DamagedSet(folder, "it was made from other data or settings")
    if prepared.stored.size_bytes <= VERIFIED_AT_ONCE_BYTES:
        prepared.verify()
    return prepared


def _is_damaged(folder: Path, identity: Identity) -> bool:
    try:
        _open(folder, identity)
    except DamagedSet:
        return True
    return False


DEFAULT_FOLDER = "~/.cache/finetune"

WITHOUT_EFFECT = frozenset(
    {"train", "validation", "chat_template", "images", "shuffle", "batching", "audit", "cache_folder"}
    | {"prepare_workers", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor"}
)
"""Keys of `data` that do not affect samples, or whose content is in the identity: the sources, the template."""

_ROWS_BETWEEN_LOGS = 100_000


class NotPrepared(DataError):
    """The set is not in the cache, and building it was not allowed."""


OnSourceProgress = Callable[[str, int, int | None], None]
"""Called with a source's key, the number of rows done, and the total number if it is known."""


def prepare_set(
    source: Source,
    encoding: Encoding,
    *,
    log: Log,
    on_progress: OnSourceProgress | None = None,
    builds: bool = True,
) -> TokenCache:
    """Return the source's samples, tokenized now or read from the cache.

    Must not be called inside a collective: while one rank tokenizes, the others wait for a lock file; if it dies,
    another one resumes its work. Truncated and dropped rows are counted in `counts`. Refused rows raise DataError with
    the counts after all rows have been read. Without `builds`, raises NotPrepared if the set is not in the cache.
    """
    section = encoding.section
    identity = identify(source, encoding)
    folder = set_folder(section, "prepared", identity, key=source.key, log=log)
    if not builds and not folder.is_dir():
        raise NotPrepared(f"{source.key}: is not prepared. Run `finetune prepare --config JOB.yaml`.")
    encoding = replace(encoding, format=source.format)
    progress = _progress(source, on_progress, log=log)
    build_staged = partial(_build, source=source, encoding=encoding, identity=identity, advance=progress, log=log)

    def build() -> bool:
        try:
            return build_once(
                folder,
                build_staged,
                log=log,
                resumes=True,
                while_waiting=lambda staging: progress(num_written_rows(staging)),
            )
        except OSError as error:
            raise DataError(
                f"data.cache_folder: writing to {folder.parent} failed: {error.strerror or error}. Free disk space "
                "or set another folder. Progress is saved. Run the same command to resume."
            ) from error

    prepared, is_new = open_verified(folder, build, identity=identity, key=source.key, log=log)
    for line in prepared.counts.lines():
        log(f"{source.key}: {line}")
    log(f"{source.key}: {'prepared in' if is_new else 'already prepared in'} {folder}")
    refuse_shares(prepared, section.audit, key=source.key)
    return prepared


def refuse_counts(counts: Counts, encoding: Encoding, *, key: str, mapped: Iterable[Any] | None = None) -> None:
    """Raise DataError with all problems: refused rows and, unless `mapped` is None, no samples, and absent columns."""
    problems, section = [], encoding.section
    if counts.long_rows and section.over_length == "refuse":
        *others, last = encoding.over_length
        instead = f"{', '.join(others)} or {last}" if others else last
        problems.append(
            f"{counts.long_rows:,} of {counts.rows:,} rows are longer than {encoding.limit.limits} "
            f"(the longest has {counts.longest:,} tokens: {counts.longest_place}). "
            f"Set data.over_length: {instead}, or {encoding.limit.advice.format(longest=counts.longest)}."
        )
    if counts.rows_without_target and section.no_target == "refuse":
        cut = ", some of them because they were truncated" if counts.truncated_targets else ""
        problems.append(
            f"{counts.rows_without_target:,} of {counts.rows:,} rows have no target{cut} "
            f"(the first: {counts.first_without_target}). Fix them, or set data.no_target: drop."
        )
    problems += [f"no row has the column `{name}` of {key}.columns. Fix it." for name in counts.absent(mapped or ())]
    if mapped is not None and not problems and counts.samples == 0:
        problems.append(f"no samples are left: {'; '.join(counts.lines())}.")
    if problems:
        raise DataError(f"{key}: " + f"\n{key}: ".join(problems))


def refuse_shares(prepared: TokenCache, section: AuditSection, *, key: str) -> None:
    """Raise DataError with every share of this source that exceeds its limit in `data.audit`."""
    duplicates = 0 if section.max_duplicate_samples is None else sum(num_duplicates([prepared.digests]))
    problems = [f"{share} {REMEDY}" for share in exceeded_shares(prepared.counts, duplicates, section)]
    if problems:
        raise DataError("\n".join(f"{key}: {problem}" for problem in problems))


def set_folder(section: DataSection, kind: str, identity: Identity, *, key: str, log: Log) -> Path:
    """Return the folder of a set or stream; log if it does not exist yet, but folders of older versions do."""
    folders = cache_folder(section) / kind
    folder = folders / f"{identity.fingerprint}-{CACHE_VERSION}"
    older = f"[!.]*-[2-{CACHE_VERSION - 1}]"
    if not folder.is_dir() and any(folders.glob(older)):
        log(
            f"{key}: rows are prepared as {folder}; what older versions of finetune prepared is not read any more and "
            f"can be deleted: {folders}/{older}"
        )
    return folder


def cache_folder(section: DataSection) -> Path:
    """Return the folder of the cache."""
    return Path(section.cache_folder or DEFAULT_FOLDER).expanduser()


def identify(source: Source, encoding: Encoding, *, stream: Mapping[str, Any] | None = None) -> Identity:
    """Return the identity of the source's set; reads the source's files once for their digest.

    For a stream, `stream` identifies the windows instead, and the files are not read.
    """
    encoder = None  # the task's own, which CACHE_VERSION and the name of the task in the identity stand for
    if not encoding.encode.__module__.startswith("finetune."):  # of a plugin
        qualified = getattr(encoding.encode, "__qualname__", type(encoding.encode).__qualname__)
        encoder = f"{encoding.encode.__module__}.{qualified}"
    parts: dict[str, Any] = {
        "source": source.identity() if stream is None else stream,
        "options": encoding.section.model_dump(mode="json", exclude=set(WITHOUT_EFFECT), exclude_defaults=True),
        "encode": encoder,
        "identity": dict(encoding.identity),
    }
    written = json.dumps(parts, sort_keys=True).encode()
    shards = tuple(shard.name for shard in source.shards())
    return Identity(hashlib.blake2b(written, digest_size=16).hexdigest(), parts, shards)


def _build(
    staging: Path,
    *,
    source: Source,
    encoding: Encoding,
    identity: Identity,
    advance: OnProgress,
    log: Log,
) -> None:
    """Build the set; a refused one is removed, an interrupted one is kept for resuming."""
    if done := num_written_rows(staging):
        log(f"{source.key}: {done:,} rows are already tokenized; resuming from there")

    def log_damage(reason: str, first_row: int) -> None:
        start = "the first row" if first_row == 1 else f"row {first_row:,}"
        log(f"warning: {source.key}: earlier tokenized rows are damaged ({reason}); rebuilding from {start}")

    try:
        with closing(EncoderPool(encoding, num_workers=num_prepare_workers(encoding.section))) as encoders:
            counts = build_set(
                staging,
                source.rows(),
                encoders,
                identity,
                advance=advance,
                num_left_out=lambda: source.num_left_out,
                on_damage=log_damage,
            )
        refuse_counts(counts, encoding, key=source.key, mapped=source.section.mapped.values())
    except WorkersLost:
        raise
    except DataError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    fault_point("prepare.done", step=counts.rows)


def _progress(source: Source, on_progress: OnSourceProgress | None, *, log: Log) -> OnProgress:
    """Return a function that reports the number of rows done and the total number, or logs the first at intervals."""
    if on_progress is not None:
        num_rows = cache(source.num_rows)  # which may count the lines of files
        return lambda rows: on_progress(source.key, rows, num_rows())
    num_logged = 0

    def log_rows(rows: int) -> None:
        nonlocal num_logged
        if rows - num_logged >= _ROWS_BETWEEN_LOGS:
            num_logged = rows
            log(f"{source.key}: {rows:,} rows tokenized")

    return log_rows


def num_written_rows(folder: Path) -> int:
    """Return the number of rows that have been written to this folder so far."""
    with suppress(Damaged, OSError):
        if paths := sorted(folder.glob("chunk-??????.bin")):
            return int(ArrayFile(paths[-1]).metadata["counts"]["rows"])
    return 0


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


COLUMNS = {"lengths": "<i4", "num_targets": "<i4", "digests": "<u8", "marks": "<u8", "row_numbers": "<i8"}
"""The dtypes of the columns, which hold one value per sample."""

CHUNKS_PER_FILE = 16
"""Encoded chunks per file: the maximum that is encoded again after a kill."""


class TokenCacheWriter:
    """Writes a prepared set into a folder, continuing after the chunk files of an earlier process."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        self._folder = folder
        self._identity = identity
        self._head = f"{identity.fingerprint}/{CACHE_VERSION}"
        self.damage: str | None = None  # why the files of an earlier process cannot be used
        chunks = self._intact_chunks()
        names = {chunk_name(number) for number in range(len(chunks))}
        for path in folder.iterdir():
            if path.name not in names:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        self.counts = Counts.read(chunks[-1].metadata["counts"]) if chunks else Counts()
        self._origins = [(start, origin) for chunk in chunks for start, origin in chunk.metadata["origins"]]
        self._num_written_origins = len(self._origins)
        self._writer = SampleWriter(folder, COLUMNS, chunks=chunks)
        self._num_pending = 0

    def append(self, chunk: EncodedChunk) -> None:
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
            "version": CACHE_VERSION,
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
                if (chunk.metadata["made_of"], chunk.metadata["number"]) != (self._head, number):
                    break  # made from other data or settings
                chunk.verify()
                chunks.append(chunk)
        except Damaged as damage:
            self.damage = str(damage)
        return chunks
