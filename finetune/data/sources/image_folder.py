"""A folder of images as a source: one sub-folder for each class, whose name is the label of all images in it."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from finetune.data.rows import RawRow
from finetune.data.sources.class_names import ClassNames
from finetune.errors import DataError
from finetune.runtime.digests import files_digest

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
