"""Files of rows in object storage and on the hub's file system, through fsspec."""

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
from finetune.runtime.text.secret_urls import REDACTED, unsigned_url, without_query

_BLOCK_BYTES = 8 << 20
_TAGS = ("ETag", "etag", "checksum", "md5Hash", "content_md5", "crc32c", "blob_id", "sha256", "hash")
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL, as the storage listed it; `url` may be signed, which its name does not tell."""

    url: str
    facts: Mapping[str, Any] = field(hash=False)
    faults = (Exception,)  # each storage has exceptions of its own

    @property
    def name(self) -> str:
        """Return the URL without user, token and signature: the same when it is signed again."""
        return unsigned_url(self.url)

    def open(self) -> BinaryIO:
        """Open it for reading; it is fetched a few megabytes at a time."""
        storage, path = fsspec.core.url_to_fs(self.url)
        opened: BinaryIO = storage.open(path, "rb", block_size=_BLOCK_BYTES)
        return opened

    def digest(self) -> str:
        """Return size and checksum as the storage knows them; where it has no checksum, name, size and time."""
        tag = next((str(self.facts[name]) for name in _TAGS if self.facts.get(name)), None)
        return f"{self.facts.get('size')} {tag}" if tag else " ".join(map(str, self.listing()))

    def listing(self) -> Any:
        """Return name, size, and checksum or time; the folder does not matter."""
        known = next((str(self.facts[name]) for name in (*_TAGS, *_TIMES) if self.facts.get(name)), None)
        return [without_query(self.name).rpartition("/")[2], self.facts.get("size"), known]


def find_remote(section: SourceSection, *, key: str, log: Callable[[str], None]) -> Files:
    """Return the file at the URL, the files of one kind of a folder, or those that a glob matches, by name.

    Raises DataError when there are none or when they cannot be loaded, MissingPackage where the storage needs one.
    """
    url = str(section.path)
    _refuse_redacted(url)
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
    named = {str(storage.unstrip_protocol(name)): each for name, each in sorted(facts.items())}
    for name in named:
        require_readable(name)
    return Files(unsigned_url(url), tuple(RemoteFile(name, each) for name, each in named.items()))


def _refuse_redacted(url: str) -> None:
    if REDACTED in url:
        raise DataError(
            f"{url}: the secret in this URL was removed from the saved job. Give the URL again: with --set, or in "
            f"the job file of --config."
        )


def _matching(storage: Any, path: str) -> dict[str, Any]:
    if _has_magic(path):
        found: dict[str, Any] = storage.glob(path, detail=True)
        return {name: facts for name, facts in found.items() if facts["type"] == "file"}
    facts = storage.info(path)
    return {path: facts} if facts["type"] == "file" else {}


def _folder(storage: Any, path: str, url: str) -> tuple[dict[str, Any], list[str]]:
    with _reachable(url):
        found = {facts["name"]: facts for facts in storage.ls(path, detail=True)}
    files = [name for name, facts in found.items() if facts["type"] == "file"]
    held, others = select_one_kind(files, folder=url.rstrip("/"))
    return {name: found[name] for name in held}, [other.rpartition("/")[2] for other in others]


def _has_magic(path: str) -> bool:
    return any(each in without_query(path) for each in "*?[")


@contextmanager
def _reachable(url: str) -> Iterator[None]:
    try:
        yield
    except FinetuneError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{url}: there is no such file, folder or bucket.") from error
    except Exception as error:  # each storage has exceptions of its own
        reason = str(error).rstrip(".") or type(error).__name__
        raise DataError(
            f"{url} cannot be loaded: {reason}. Check the URL, and the credentials in the environment."
        ) from error
