"""Data files on this machine (a file, folder, glob, or folder of images), in object storage and on the hub."""

import glob
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from huggingface_hub.constants import HF_HUB_CACHE

from finetune.config.sections.data import SourceSection, TrainedSourceSection
from finetune.data.images import ENDINGS
from finetune.data.rows import RawRow
from finetune.data.sources.files import (
    DataFile,
    Files,
    Origin,
    OriginShard,
    format_not_read,
    is_readable,
    require_readable,
    select_one_kind,
)
from finetune.data.sources.tables import ClassNames, class_names, without_fillers
from finetune.data.upstream import set_datasets_offline
from finetune.errors import DataError, FinetuneError, NotAFile
from finetune.runtime.files.digests import file_digest, files_digest
from finetune.runtime.files.read import open_regular, require_regular
from finetune.runtime.files.remote import STORAGE_PACKAGES
from finetune.runtime.optional import require
from finetune.runtime.text.redact import REDACTED, unsigned_url, without_query
from finetune.runtime.upstream import is_offline, without_hub_retries

_SPLITS = frozenset({"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"})


@dataclass(frozen=True)
class ImageFolder(Origin):
    """Rows of `image` (the file's path) and `label` (the subfolder), in the order of the paths; named by its path."""

    files: tuple[Path, ...]  # relative to the folder

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield a row per image, without the first `start`; no image is opened."""
        for number, file in enumerate(self.files[start:], start=start + 1):
            yield RawRow(self.name, number, {"image": str(Path(self.name) / file), "label": file.parts[0]})

    @cached_property
    def digest(self) -> str:
        """Return a digest of all images and their labels; unmodified files are not read again."""
        labels = hashlib.blake2b("\n".join(file.parts[0] for file in self.files).encode(), digest_size=16).hexdigest()
        try:
            return f"images {labels} {files_digest([Path(self.name) / file for file in self.files])}"
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error

    def listing(self) -> Any:
        """Return path, size and time of every image."""
        states = ((file, (Path(self.name) / file).stat()) for file in self.files)
        return [[file.as_posix(), state.st_size, state.st_mtime_ns] for file, state in states]


def find_image_folder(folder: Path) -> ImageFolder | None:
    """Return the images in the subfolders, at any depth; None if there are none.

    Names that start with `.` or `_` are skipped. Raises DataError for images outside of subfolders, and if the
    subfolders are splits.
    """
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "_")))
    files = tuple(
        file.relative_to(folder)
        for class_folder in classes
        for file in sorted(file for file in class_folder.rglob("*") if is_image_file(file))
    )
    num_unlabelled = sum(is_image_file(file) for file in folder.iterdir())
    if num_unlabelled:
        raise DataError(
            f"{folder} contains {num_unlabelled:,} images outside of subfolders, so their classes are unknown. Move "
            "each into a folder named after its class, or write paths and labels to a data file."
        )
    if not files:
        return None
    labels = {file.parts[0] for file in files}
    if {label.lower() for label in labels} <= _SPLITS:
        example = folder / min(labels)
        raise DataError(f"the subfolders of {folder} are splits, not classes. Name one of them: {example}.")
    return ImageFolder(str(folder), files, image_folders=(folder,))


def is_image_file(path: Path) -> bool:
    """Return whether the file is an image, judged by its name."""
    return path.suffix.lower() in ENDINGS and not path.name.startswith((".", "_")) and path.is_file()


@dataclass(frozen=True)
class LocalFile(DataFile):
    """A local file."""

    faults = (OSError, EOFError, UnicodeDecodeError)

    def open(self) -> BinaryIO:
        """Open it for reading."""
        return open_regular(Path(self.name))

    def digest(self) -> str:
        """Return a digest of its content."""
        return file_digest(Path(self.name))

    def listing(self) -> Any:
        """Return name, size and modification time; the folder does not matter."""
        state = Path(self.name).stat()
        return [Path(self.name).name, state.st_size, state.st_mtime_ns]


def find_local(section: SourceSection, *, key: str, log: Callable[[str], None]) -> Origin:
    """Return the file, the data files of a folder, or the matches of a glob, sorted by name.

    A folder without data files whose subfolders contain images is a folder of images; the subfolders are the classes.
    Raises DataError if there are no files, if a format is unknown, or if a link leads out of the folder or the base of
    the glob and `follow_links` is not set. Logs the entries of a folder that are not read.
    """
    assert section.path is not None
    path = Path(section.path)
    if path.is_dir():
        has_rows = any(is_readable(file.name) and file.is_file() for file in path.iterdir())
        images = None if has_rows else find_image_folder(path)
        if images is not None:
            if not section.follow_links:
                _refuse_links_out([path / file for file in images.files], path, key=key)
            return images
        entries = sorted(path.iterdir())
        names, others = select_one_kind([str(entry) for entry in entries if entry.is_file()], folder=str(path))
        folders = [f"{entry.name}/" for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
        if unread := [*(Path(other).name for other in others), *folders]:
            log(f"{key}.path: {path} {format_not_read(unread)}")
        files, base = [Path(name) for name in names], path
    elif path.exists():
        if path.is_symlink():
            log(f"{key}.path: {path} is a link to {path.resolve()}")
        try:
            require_regular(path)
        except NotAFile as error:
            raise DataError(f"{path}: {error.strerror}. Rows are read several times: write them to a file.") from error
        files, base = [path], None
    else:
        patterns = (index for index, part in enumerate(path.parts) if glob.has_magic(part))
        base = Path(*path.parts[: next(patterns, len(path.parts) - 1)])
        files = sorted(match for match in base.glob(str(path.relative_to(base))) if match.is_file())
    if not files:
        raise DataError(f"{path}: there is no such file. A relative path is resolved against the config file's folder.")
    for file in files:
        require_readable(str(file))
    if base is not None and not section.follow_links:
        _refuse_links_out(files, base, key=key)
    local_files = tuple(LocalFile(str(file)) for file in files)
    return Files(section.path, local_files, image_folders=(base or path.parent,))


def _refuse_links_out(files: list[Path], base: Path, *, key: str) -> None:
    allowed = base.resolve()
    for file in files:
        target = file.resolve()
        if not target.is_relative_to(allowed):
            raise DataError(
                f"{file} is a link to {target}, outside of {base}. To read it, set {key}.follow_links: true."
            )


_BLOCK_BYTES = 8 << 20
_TAGS = ("ETag", "etag", "checksum", "md5Hash", "content_md5", "crc32c", "blob_id", "sha256", "hash")
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")


@dataclass(frozen=True)
class RemoteFile(DataFile):
    """A file in a storage; its name is the URL without user, token and signature, however the URL is signed."""

    url: str  # as it is opened
    info: Mapping[str, Any] = field(hash=False)  # as listed by the storage
    faults = (Exception,)  # every storage has its own exceptions

    def open(self) -> BinaryIO:
        """Open it for reading, a few megabytes at a time."""
        storage, path = fsspec.core.url_to_fs(self.url)
        opened: BinaryIO = storage.open(path, "rb", block_size=_BLOCK_BYTES)
        return opened

    def digest(self) -> str:
        """Return size and checksum as reported by the storage, or without a checksum, name, size and time."""
        tag = next((str(self.info[name]) for name in _TAGS if self.info.get(name)), None)
        return f"{self.info.get('size')} {tag}" if tag else " ".join(map(str, self.listing()))

    def listing(self) -> Any:
        """Return name, size, and checksum or time; the folder does not matter."""
        tag = next((str(self.info[name]) for name in (*_TAGS, *_TIMES) if self.info.get(name)), None)
        return [without_query(self.name).rpartition("/")[2], self.info.get("size"), tag]


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
    try:
        storage, path = fsspec.core.url_to_fs(url)
        storage.invalidate_cache()
        is_pattern = any(character in without_query(path) for character in "*?[")
        matches: dict[str, Any] = storage.glob(path, detail=True) if is_pattern else {path: storage.info(path)}
        facts = {name: file_facts for name, file_facts in matches.items() if file_facts["type"] == "file"}
        if not facts and not is_pattern:
            entries = {entry["name"]: entry for entry in storage.ls(path, detail=True)}
            files = [name for name, entry in entries.items() if entry["type"] == "file"]
            data_files, others = select_one_kind(files, folder=url.rstrip("/"))
            facts = {name: entries[name] for name in data_files}
            if others:
                log(f"{key}.path: {url} {format_not_read([other.rpartition('/')[2] for other in others])}")
    except FinetuneError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{url}: there is no such file, folder or bucket.") from error
    except Exception as error:  # every storage has its own exceptions
        reason = str(error).rstrip(".") or type(error).__name__
        raise DataError(
            f"{url} cannot be loaded: {reason}. Check the URL, and the credentials in the environment."
        ) from error
    if not facts:
        raise DataError(f"{url}: there is no such file.")
    facts_of = {str(storage.unstrip_protocol(name)): file_facts for name, file_facts in sorted(facts.items())}
    for name in facts_of:
        require_readable(name)
    remote = (RemoteFile(unsigned_url(name), name, file_facts) for name, file_facts in facts_of.items())
    return Files(unsigned_url(url), tuple(remote))


@dataclass(frozen=True)
class HubDataset(Origin):
    """A split of a hub dataset, downloaded or read over the network: data files are read, and code is never run."""

    dataset: Any  # datasets.Dataset, or IterableDataset if it is streamed
    version: str  # the fingerprint of `datasets`; of a stream the version of the files on the hub, which are not read
    is_streamed: bool = False

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield the rows of a downloaded split in the dataset's order, without the first `start`."""
        kept = range(min(start, len(self.dataset)), len(self.dataset))
        for number, row in enumerate(self.dataset.select(kept), start=start + 1):
            yield RawRow(self.name, number, without_fillers(row))

    def num_rows(self, at_most: int) -> int:
        """Return the number of rows of a downloaded split, but at most `at_most`."""
        return min(at_most, len(self.dataset))

    def shards(self) -> Sequence[OriginShard]:
        """Return the shards that `datasets` makes of a streamed split's files."""
        numbers = range(self.dataset.num_shards if self.is_streamed else 0)
        return tuple(HubShard(f"{self.name}, shard {number}", self.dataset, number) for number in numbers) or (self,)

    @cached_property
    def digest(self) -> str:
        """Return the version, which requires no reading."""
        return self.version

    def listing(self) -> Any:
        """Return name and version."""
        return [self.name, self.version]

    def class_names(self) -> ClassNames:
        """Return the names of its `ClassLabel` columns, if the dataset describes its columns."""
        features = getattr(self.dataset, "features", None)  # unknown of some streams
        return class_names(features.to_dict()) if features else {}


@dataclass(frozen=True)
class HubShard(OriginShard):
    """One shard of a stream."""

    dataset: Any
    number: int

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield the shard's rows without the first `start`."""
        shard = self.dataset.shard(num_shards=self.dataset.num_shards, index=self.number)
        try:
            for number, row in enumerate(shard.skip(start) if start else shard, start=start + 1):
                yield RawRow(self.name, number, without_fillers(row))
        except Exception as error:  # of the network, and of the files' formats
            raise DataError(f"{self.name} cannot be read: {_reason(error)}") from error


def load_hub_dataset(source: SourceSection) -> Origin:
    """Return the split, downloaded unless it is cached, or streamed if the section has `stream`.

    Raises DataError if it cannot be loaded.
    """
    assert source.name is not None
    config = f", config {source.config}" if source.config else ""
    revision = f", revision {source.revision}" if source.revision else ""
    title = f"`{source.name}`{config}, split {source.split}{revision}"
    is_streamed = isinstance(source, TrainedSourceSection) and source.stream is not None
    try:
        with without_hub_retries(is_local=False):
            datasets = require("datasets", extra="dev", purpose="Reading a hub dataset")
            set_datasets_offline(datasets, is_offline=is_offline())
            if is_streamed:
                builder = datasets.load_dataset_builder(source.name, source.config, revision=source.revision)
                dataset = builder.as_streaming_dataset(split=source.split)
            else:
                dataset = datasets.load_dataset(
                    source.name, source.config, split=source.split, revision=source.revision, streaming=False
                )
            # images stay encoded bytes, which are decoded when batches are made
            for column, feature in (getattr(dataset, "features", None) or {}).items():
                if isinstance(feature, datasets.Image):
                    dataset = dataset.cast_column(column, datasets.Image(decode=False))
                elif isinstance(getattr(feature, "feature", None), datasets.Image):
                    dataset = dataset.cast_column(column, type(feature)(datasets.Image(decode=False)))
            downloads = (datasets.config.HF_DATASETS_CACHE, datasets.config.DOWNLOADED_DATASETS_PATH, HF_HUB_CACHE)
            folders = [Path(folder).expanduser() for folder in downloads]
            if Path(source.name).is_dir():
                folders.insert(0, Path(source.name).absolute())
            version = str(builder.hash if is_streamed else dataset._fingerprint)
            return HubDataset(title, dataset, version, is_streamed, image_folders=tuple(folders))
    except Exception as error:  # `datasets` raises many exception types for a bad name
        raise DataError(f"hub dataset {title} cannot be loaded: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, ConnectionError):
        return f"the hub cannot be reached ({reason}). Go online once, or pass a local file with `path`."
    if "scripts are no longer supported" in reason:
        return "it consists of Python code, which is never run. Convert it to Parquet and pass that with `path`."
    return (
        f"{reason.rstrip('.')}. Check `name`, `config`, `split` and `revision`; private ones require `hf auth login`."
    )
