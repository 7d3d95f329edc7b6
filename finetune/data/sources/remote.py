"""Data files in object storage and on the hub's file system, through fsspec."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import fsspec

from finetune.config.sections.data import SourceSection
from finetune.data.sources.files import Files, format_not_read, require_readable, select_one_kind
from finetune.errors import DataError, FinetuneError
from finetune.runtime.files.remote import STORAGE_PACKAGES
from finetune.runtime.optional import require
from finetune.runtime.text.secret_patterns import REDACTED, unsigned_url, without_query

_BLOCK_BYTES = 8 << 20
_TAGS = ("ETag", "etag", "checksum", "md5Hash", "content_md5", "crc32c", "blob_id", "sha256", "hash")
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL, as listed by the storage; `url` may be signed, `name` is not."""

    url: str
    facts: Mapping[str, Any] = field(hash=False)
    faults = (Exception,)  # every storage has its own exceptions

    @property
    def name(self) -> str:
        """Return the URL without user, token and signature: it does not change when the URL is signed again."""
        return unsigned_url(self.url)

    def open(self) -> BinaryIO:
        """Open it for reading, a few megabytes at a time."""
        storage, path = fsspec.core.url_to_fs(self.url)
        opened: BinaryIO = storage.open(path, "rb", block_size=_BLOCK_BYTES)
        return opened

    def digest(self) -> str:
        """Return size and checksum as reported by the storage, or without a checksum, name, size and time."""
        tag = next((str(self.facts[name]) for name in _TAGS if self.facts.get(name)), None)
        return f"{self.facts.get('size')} {tag}" if tag else " ".join(map(str, self.listing()))

    def listing(self) -> Any:
        """Return name, size, and checksum or time; the folder does not matter."""
        tag = next((str(self.facts[name]) for name in (*_TAGS, *_TIMES) if self.facts.get(name)), None)
        return [without_query(self.name).rpartition("/")[2], self.facts.get("size"), tag]


def find_remote(section: SourceSection, *, key: str, log: Callable[[str], None]) -> Files:
    """Return the file at the URL, the data files of a folder, or the matches of a glob, sorted by name.

    Raises DataError if there are none or they cannot be read, MissingPackage if the storage requires a package.
    """
    url = str(section.path)
    if REDACTED in url:
        raise DataError(
            f"{url}: the secret in this URL was removed from the saved job. Pass the URL again with --set, or in "
            f"the job file of --config."
        )
    scheme = url.partition("://")[0]
    if scheme in STORAGE_PACKAGES:
        package, extra = STORAGE_PACKAGES[scheme]
        require(package, extra=extra, purpose=f"{key}.path at {scheme}://")
    with _reachable(url):
        storage, path = fsspec.core.url_to_fs(url)
        storage.invalidate_cache()
        facts = _matching(storage, path)
    if not facts and not _has_magic(path):
        facts, others = _folder(storage, path, url)
        if others:
            log(f"{key}.path: {url} {format_not_read(others)}")
    if not facts:
        raise DataError(f"{url}: there is no such file.")
    facts_of = {str(storage.unstrip_protocol(name)): file_facts for name, file_facts in sorted(facts.items())}
    for name in facts_of:
        require_readable(name)
    return Files(unsigned_url(url), tuple(RemoteFile(name, file_facts) for name, file_facts in facts_of.items()))


def _matching(storage: Any, path: str) -> dict[str, Any]:
    if _has_magic(path):
        matches: dict[str, Any] = storage.glob(path, detail=True)
        return {name: facts for name, facts in matches.items() if facts["type"] == "file"}
    facts = storage.info(path)
    return {path: facts} if facts["type"] == "file" else {}


def _folder(storage: Any, path: str, url: str) -> tuple[dict[str, Any], list[str]]:
    with _reachable(url):
        entries = {facts["name"]: facts for facts in storage.ls(path, detail=True)}
    files = [name for name, facts in entries.items() if facts["type"] == "file"]
    data_files, others = select_one_kind(files, folder=url.rstrip("/"))
    return {name: entries[name] for name in data_files}, [other.rpartition("/")[2] for other in others]


def _has_magic(path: str) -> bool:
    return any(character in without_query(path) for character in "*?[")


@contextmanager
def _reachable(url: str) -> Iterator[None]:
    try:
        yield
    except FinetuneError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{url}: there is no such file, folder or bucket.") from error
    except Exception as error:  # every storage has its own exceptions
        reason = str(error).rstrip(".") or type(error).__name__
        raise DataError(
            f"{url} cannot be loaded: {reason}. Check the URL, and the credentials in the environment."
        ) from error
