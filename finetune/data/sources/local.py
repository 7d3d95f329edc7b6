"""Files of rows on this machine: a file, a folder, a glob, or a folder of images whose sub-folders are classes."""

import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from finetune.config.sections.data import SourceSection
from finetune.data.rows import RawRow
from finetune.data.sources.files import (
    Files,
    Origin,
    format_not_read,
    is_readable,
    kind_of,
    require_readable,
    select_one_kind,
)
from finetune.data.sources.readers import TEXT_KINDS
from finetune.data.sources.tables import ClassNames
from finetune.errors import DataError, NotAFile
from finetune.runtime.files.digests import file_digest, files_digest
from finetune.runtime.files.read import open_regular, require_regular

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".jp2", ".avif")
"""Endings of the images that are looked for."""

_SPLITS = frozenset({"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"})


@dataclass(frozen=True)
class ImageFolder:
    """Its own only shard: rows of `image` (the file's path) and `label` (the sub-folder), in the order of the paths."""

    folder: Path
    files: tuple[Path, ...]  # relative to the folder

    @property
    def name(self) -> str:
        """Return the folder's path."""
        return str(self.folder)

    def shards(self) -> Sequence["ImageFolder"]:
        """Return itself: any row is found at once."""
        return (self,)

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield a row for each image, without the first `start`; no image is opened."""
        for number, file in enumerate(self.files[start:], start=start + 1):
            yield RawRow(self.name, number, {"image": str(self.folder / file), "label": file.parts[0]})

    def num_rows(self, at_most: int) -> int:
        """Return how many images there are, or `at_most`."""
        return min(at_most, len(self.files))

    def digest(self) -> str:
        """Return a digest of all images and their labels; files that were not written since are not read again."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        labels = hashlib.blake2b("\n".join(file.parts[0] for file in self.files).encode(), digest_size=16).hexdigest()
        try:
            return f"images {labels} {files_digest([self.folder / file for file in self.files])}"
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error

    def listing(self) -> Any:
        """Return path, size and time of every image."""
        states = ((file, (self.folder / file).stat()) for file in self.files)
        return [[file.as_posix(), state.st_size, state.st_mtime_ns] for file, state in states]

    def image_folders(self) -> Sequence[Path]:
        """Return the folder."""
        return (self.folder,)

    def class_names(self) -> ClassNames:
        """Return none: its labels are names."""
        return {}


def find_image_folder(folder: Path) -> ImageFolder | None:
    """Return the images in the sub-folders, at whatever depth; None where none of them holds any.

    Names that begin with `.` or `_` are passed over. Raises DataError for images that are in no sub-folder, and where
    the sub-folders are splits.
    """
    classes = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith((".", "_")))
    files = tuple(file.relative_to(folder) for each in classes for file in _images(each))
    alone = sum(is_image(file) for file in folder.iterdir())
    if alone:
        raise DataError(
            f"{folder} holds {alone:,} images that are in no sub-folder, so that their class is not known. Move each "
            "into a folder that is named as its class, or write paths and labels to a file of rows."
        )
    if not files:
        return None
    labels = {file.parts[0] for file in files}
    if {label.lower() for label in labels} <= _SPLITS:
        some = folder / min(labels)
        raise DataError(f"the sub-folders of {folder} are splits, not classes. Name one of them: {some}.")
    return ImageFolder(folder, files)


def is_image(path: Path) -> bool:
    """Tell by its name whether a file is an image."""
    return path.suffix.lower() in ENDINGS and not path.name.startswith((".", "_")) and path.is_file()


def _images(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if is_image(file))


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine."""

    path: Path
    faults = (OSError, EOFError, UnicodeDecodeError)

    @property
    def name(self) -> str:
        """Return its path."""
        return str(self.path)

    def open(self) -> BinaryIO:
        """Open it for reading."""
        return open_regular(self.path)

    def digest(self) -> str:
        """Return a digest of its content."""
        return file_digest(self.path)

    def listing(self) -> Any:
        """Return name, size and time of its last change; the folder does not matter."""
        state = self.path.stat()
        return [self.path.name, state.st_size, state.st_mtime_ns]


def find_local(section: SourceSection, *, key: str, log: Callable[[str], None]) -> Origin:
    """Return the file, the files of one kind of a folder, or those that a glob matches, in the order of their names.

    Of a folder whose sub-folders hold images and that has no rows, these images, the sub-folders being their classes.
    Raises DataError when there are none, when a kind is unknown, or when a folder or glob leads outside of its base
    through a link and `follow_links` is not set. What is in a folder and not read is said.
    """
    assert section.path is not None
    path = Path(section.path)
    if path.is_dir():
        images = None if _has_rows(path) else find_image_folder(path)
        if images is not None:
            if not section.follow_links:
                _refuse_links_out([path / each for each in images.files], path, key=key)
            return images
        found, base = _of_folder(path, key=key, log=log), path
    elif path.exists():
        if path.is_symlink():
            log(f"{key}.path: {path} is a link to {path.resolve()}")
        _require_file(path)
        found, base = [path], None
    else:
        base = _base(path)
        found = sorted(each for each in base.glob(str(path.relative_to(base))) if each.is_file())
    if not found:
        raise DataError(f"{path}: there is no such file. A relative path is resolved against the config file's folder.")
    for file in found:
        require_readable(str(file))
        _require_no_hole(file)
    if base is not None and not section.follow_links:
        _refuse_links_out(found, base, key=key)
    return Files(section.path, tuple(map(LocalFile, found)), base or path.parent)


def _require_file(path: Path) -> None:
    """Raise DataError for a FIFO or a device: rows are read more than once, the first of them before all others."""
    try:
        require_regular(path)
    except NotAFile as error:
        raise DataError(f"{path}: {error.strerror}. Rows are read several times: write them to a file.") from error


_HOLE_BYTES = 1 << 20


def _require_no_hole(path: Path) -> None:
    """Raise DataError where a file of text has a part that was never written, which reads as zero bytes.

    A terabyte of them takes no place on the disk, and hours to read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        hole = os.lseek(file.fileno(), 0, os.SEEK_HOLE) if size > _HOLE_BYTES else size
        if size - hole > _HOLE_BYTES and kind_of(path.name)[0] in TEXT_KINDS:
            file.seek(hole)
            if not file.read(_HOLE_BYTES).strip(b"\0"):
                raise DataError(
                    f"{path}: has only zero bytes from byte {hole:,} on: the file was not written to its end."
                )


def _has_rows(folder: Path) -> bool:
    return any(is_readable(each.name) and each.is_file() for each in folder.iterdir())


def _of_folder(folder: Path, *, key: str, log: Callable[[str], None]) -> list[Path]:
    entries = sorted(folder.iterdir())
    held, others = select_one_kind([str(each) for each in entries if each.is_file()], folder=str(folder))
    folders = [f"{each.name}/" for each in entries if each.is_dir() and not each.name.startswith(".")]
    unread = [*(Path(other).name for other in others), *folders]
    if unread:
        log(f"{key}.path: {folder} {format_not_read(unread)}")
    return [Path(each) for each in held]


def _base(pattern: Path) -> Path:
    """Return the folder of a glob in which it looks: all parts before the first that stands for several names."""
    for number, part in enumerate(pattern.parts):
        if glob.has_magic(part):
            return Path(*pattern.parts[:number])
    return pattern.parent


def _refuse_links_out(files: list[Path], base: Path, *, key: str) -> None:
    allowed = base.resolve()
    for file in files:
        target = file.resolve()
        if not target.is_relative_to(allowed):
            raise DataError(
                f"{file} is a link to {target}, outside of {base}. To read it, set {key}.follow_links: true."
            )
