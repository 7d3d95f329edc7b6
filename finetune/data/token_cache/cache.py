"""Rows are tokenized once and found again by content: one process builds the set, others wait on a lock file.

A set is verified when it is opened; a damaged one is quarantined and built again.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from finetune.config.sections.data import DataSection
from finetune.data.sources.source import Source
from finetune.data.token_cache.build import OnProgress, build_set, num_written_rows, refuse_counts, refuse_shares
from finetune.data.token_cache.chunks import Encode, Encoding, EncodingPlan
from finetune.data.token_cache.encoder_pool import EncoderPool, WorkersLost
from finetune.data.token_cache.integrity import DamagedSet, quarantine_set, quarantined_copies
from finetune.data.token_cache.store import FORMAT_VERSION, Identity, TokenCache
from finetune.data.workers import num_prepare_workers
from finetune.errors import DataError
from finetune.runtime.files.atomic import build_once
from finetune.runtime.files.recorded_names import recorded_name
from finetune.runtime.supervision.heartbeat import fault_point

VERIFIED_AT_ONCE_BYTES = 256 << 20
"""A set up to this size is verified before it is used, in hundredths of a second; a larger one in the background."""

_MAX_ATTEMPTS = 3

Log = Callable[[str], None]


def open_verified(
    folder: Path, make: Callable[[], bool], *, made_of: Identity, key: str, log: Log
) -> tuple[TokenCache, bool]:
    """Return the set, and whether `make` has just built it; raises DataError where it is damaged again and again.

    `make` builds the folder unless it exists. A large set is verified in the background from now on.
    """
    for _ in range(_MAX_ATTEMPTS):
        is_new = make()
        try:
            prepared = _opened(folder, made_of)
        except DamagedSet as damage:
            damaged: DamagedSet = damage
            _quarantine(damage, partial(_is_damaged, folder, made_of), key=key, log=log)
            continue
        if copies := quarantined_copies(folder):
            log(
                f"warning: {key}: its prepared set was damaged and has been rebuilt; the damaged one is kept as "
                f"{', '.join(map(str, copies))}. Check the disk and the memory of this machine, then delete it."
            )
        if not _is_small(prepared):
            prepared.verification.start()
        prepared.remake = partial(_remade, make=make, made_of=made_of, key=key, log=log)
        return prepared, is_new
    raise DataError(
        f"{key}: {damaged}, and so were the sets built in its place. Check the disk and the memory of this machine, "
        f"or set data.cache_folder to another disk."
    )


def repair(prepared: TokenCache, *, seconds: float | None) -> None:
    """Wait for the verification, at most `seconds`; a set that is damaged is rebuilt and read from then on."""
    prepared.verification.wait(seconds)
    if prepared.verification.problem and prepared.remake is not None:
        prepared.reopen(prepared.remake(prepared))


def _opened(folder: Path, made_of: Identity) -> TokenCache:
    prepared = TokenCache(folder, shards=made_of.shards)
    if prepared.fingerprint != made_of.fingerprint:
        raise DamagedSet(folder, "it was made from other data or settings")
    if _is_small(prepared):
        prepared.verify()
    return prepared


def _is_small(prepared: TokenCache) -> bool:
    return prepared.verification.size_bytes <= VERIFIED_AT_ONCE_BYTES


def _is_damaged(folder: Path, made_of: Identity) -> bool:
    try:
        _opened(folder, made_of)
    except DamagedSet:
        return True
    return False


def _remade(prepared: TokenCache, *, make: Callable[[], bool], made_of: Identity, key: str, log: Log) -> TokenCache:
    damage = DamagedSet(prepared.folder, prepared.verification.problem or "")
    _quarantine(damage, prepared.is_still_damaged, key=key, log=log)
    return open_verified(prepared.folder, make, made_of=made_of, key=key, log=log)[0]


def _quarantine(damage: DamagedSet, is_damaged: Callable[[], bool], *, key: str, log: Log) -> None:
    aside = quarantine_set(damage.folder, is_damaged, log=log)
    if aside is not None:
        log(f"warning: {key}: {damage}. It is set aside as {aside.name} and rebuilt.")


DEFAULT_FOLDER = "~/.cache/finetune"

CODE_VERSION = 3
"""Increased whenever the same rows would be encoded differently than before: older sets are then not used."""

_FIRST_FORMAT = 2
"""Stays: a fingerprint is that of the content, by which checkpoints know their data; the files' form may change."""

WITHOUT_EFFECT = frozenset(
    {"train", "validation", "chat_template", "images", "shuffle", "batching", "audit", "cache_folder"}
    | {"prepare_workers", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor"}
)
"""Keys of `data` that no sample depends on, or that count by their content: the sources, the template."""

_ROWS_BETWEEN_LOGS = 100_000


class NotPrepared(DataError):
    """The set is not in the cache, and was not to be built."""


OnSourceProgress = Callable[[str, int, int | None], None]
"""Called with a source's key, how many of its rows are done, and how many there are where that is known."""


def prepare_set(
    source: Source,
    encoding: Encoding,
    *,
    log: Log,
    on_progress: OnSourceProgress | None = None,
    builds: bool = True,
) -> TokenCache:
    """Return the source's samples, tokenized now or found in the cache of earlier runs.

    Call it outside any collective: ranks that come while one of them tokenizes wait on a lock file, and if it dies,
    another resumes from where it stopped. What is cut or dropped is counted in `counts`; what the section refuses
    raises DataError with the counts, after all rows have been seen. Without `builds`, NotPrepared where it is not
    found.
    """
    section = encoding.section
    made_of = identify(source, encoding)
    folder = set_folder(section, made_of)
    log_older_versions(folder, key=source.key, log=log)
    if not builds and not folder.is_dir():
        raise NotPrepared(f"{source.key}: is not prepared. Run `finetune prepare --config JOB.yaml`.")
    plan = encoding.plan(source.format)
    shown = _ReportedProgress(source, on_progress) if on_progress else _LoggedProgress(source.key, log)
    build = partial(_build, source=source, plan=plan, made_of=made_of, section=section, advance=shown, log=log)
    make = partial(_make, folder, build, log=log, while_waiting=lambda made: shown(num_written_rows(made)))
    prepared, is_new = open_verified(folder, make, made_of=made_of, key=source.key, log=log)
    for line in prepared.counts.lines():
        log(f"{source.key}: {line}")
    log(f"{source.key}: {'prepared in' if is_new else 'already prepared in'} {folder}")
    refuse_shares(prepared, section.audit, key=source.key)
    return prepared


def log_older_versions(folder: Path, *, key: str, log: Log) -> None:
    """Log it where `folder` does not exist yet, but was written by an earlier version of the format of these files."""
    fingerprint = folder.name.rpartition("-")[0]
    older = [folder.with_name(f"{fingerprint}-{version}") for version in range(_FIRST_FORMAT, FORMAT_VERSION)]
    if not folder.is_dir() and (existing := [path for path in older if path.is_dir()]):
        log(
            f"{key}: {', '.join(map(str, existing))} was prepared by an older version of finetune, in another format. "
            f"It is prepared again as {folder.name}; the older one can be deleted."
        )


def set_folder(section: DataSection, made_of: Identity) -> Path:
    """Return where the set of that identity lies, or will lie."""
    return cache_folder(section) / "prepared" / folder_name(made_of)


def folder_name(made_of: Identity) -> str:
    """Return the name of a folder for what is made of this: another one whenever the form of the files changes."""
    return f"{made_of.fingerprint}-{FORMAT_VERSION}"


def cache_folder(section: DataSection) -> Path:
    """Return where tokenized rows are kept."""
    return Path(section.cache_folder or DEFAULT_FOLDER).expanduser()


def identify(source: Source, encoding: Encoding, *, stream: Mapping[str, Any] | None = None) -> Identity:
    """Return what the source's set is made of; reads the source's files once for their digest.

    `stream` is what decides the windows of a stream, whose files are not read for it.
    """
    parts: dict[str, Any] = {
        "code_version": [CODE_VERSION, _FIRST_FORMAT],
        "source": source.identity() if stream is None else stream,
        "options": encoding.section.model_dump(mode="json", exclude=set(WITHOUT_EFFECT), exclude_defaults=True),
        "encode": _name_of(encoding.encode),
        "identity": dict(encoding.identity),
    }
    written = json.dumps(parts, sort_keys=True).encode()
    shards = tuple(shard.name for shard in source.shards())
    return Identity(hashlib.blake2b(written, digest_size=16).hexdigest(), parts, shards)


def _name_of(encode: Encode) -> str:
    """Return the name under which prepared sets know the encoder: of one from outside the package, where it stands."""
    recorded = recorded_name(encode)
    if recorded is not None:
        return f"finetune.{recorded}"
    return f"{encode.__module__}.{getattr(encode, '__qualname__', type(encode).__qualname__)}"


def _build(
    staging: Path,
    *,
    source: Source,
    plan: EncodingPlan,
    made_of: Identity,
    section: DataSection,
    advance: OnProgress,
    log: Log,
) -> None:
    """Build the set; a refused one is removed, an interrupted one is kept to resume from."""
    if done := num_written_rows(staging):
        log(f"{source.key}: {done:,} rows are already tokenized; resuming from there")

    def log_damage(reason: str, first_row: int) -> None:
        start = "the first row" if first_row == 1 else f"row {first_row:,}"
        log(f"warning: {source.key}: what was tokenized so far is damaged ({reason}); it is rebuilt from {start}")

    try:
        with EncoderPool(plan, num_workers=num_prepare_workers(section)) as encoders:
            counts = build_set(
                staging,
                source.rows(),
                encoders,
                made_of,
                advance=advance,
                num_left_out=lambda: source.num_left_out,
                on_damage=log_damage,
            )
        refuse_counts(counts, section, key=source.key, length=plan.length)
    except WorkersLost:
        raise
    except DataError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    fault_point("prepare.done", step=counts.rows)


def _make(folder: Path, build: Callable[[Path], None], *, log: Log, while_waiting: Callable[[Path], None]) -> bool:
    with _cache_errors(folder):
        return build_once(folder, build, log=log, goes_on=True, while_waiting=while_waiting)


@contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"data.cache_folder: {folder.parent} cannot be written: {error}. Free disk space or set another folder; "
            f"what is done is kept, and the next start resumes from it."
        ) from error


class _LoggedProgress:
    """Logs now and then how many rows are done."""

    def __init__(self, key: str, log: Log) -> None:
        self._key = key
        self._log = log
        self._logged = 0

    def __call__(self, rows: int) -> None:
        if rows - self._logged >= _ROWS_BETWEEN_LOGS:
            self._logged = rows
            self._log(f"{self._key}: {rows:,} rows tokenized")


class _ReportedProgress:
    """Reports how many rows are done, and of how many."""

    def __init__(self, source: Source, on_progress: OnSourceProgress) -> None:
        self._source = source
        self._on_progress = on_progress

    @cached_property
    def _num_rows(self) -> int | None:
        return self._source.num_rows()

    def __call__(self, rows: int) -> None:
        self._on_progress(self._source.key, rows, self._num_rows)
