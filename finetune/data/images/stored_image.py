"""Images in rows: a path, bytes, a `{bytes, path}` object, or base64 text; never a URL."""

import base64
import binascii
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.rows import describe
from finetune.errors import DataError
from finetune.runtime.files.read import open_regular, require_regular

_MIN_BASE64_LENGTH = 64

MAX_BYTES = 1 << 30
"""The maximum size of an image file."""


@dataclass(frozen=True)
class ImageRoot:
    """The folders in which image files named by rows must be; without folders, rows must not name files."""

    folders: tuple[Path, ...]
    key: str  # of the source in the job YAML
    follow_links: bool = False
    counts_from: Path | None = None  # the folder to which paths are relative; None for the folder of their rows

    def refuse_outside(self, path: Path, *, title: str) -> None:
        """Raise DataError for a path outside of all folders, such as `../x` or an absolute path."""
        normalized = Path(os.path.normpath(path))
        is_inside = any(normalized.is_relative_to(folder.absolute()) for folder in self.folders)
        if not is_inside and not self._resolves_inside(path):  # a folder may have several names
            raise DataError(
                f"{title} is the path `{path}`, which is outside of {self._describe()}. Write "
                f"{self.key}.image_root: FOLDER, the folder that contains all images."
            )

    def resolve(self, path: Path) -> Path:
        """Return the resolved path; raises DataError for a link to a file outside of all folders."""
        if not self.follow_links and not self._resolves_inside(path):
            remedy = f"To read such images, set {self.key}.follow_links: true."
            raise DataError(f"{path} is a link to a file outside of {self._describe()}. {remedy}")
        return path.resolve()

    def _resolves_inside(self, path: Path) -> bool:
        target = path.resolve()
        return any(target.is_relative_to(folder.resolve()) for folder in self.folders)

    def _describe(self) -> str:
        return " and ".join(map(str, self.folders)) or "the rows, which do not come from a local folder"


@dataclass(frozen=True)
class StoredImage:
    """An encoded image in memory, or in a file that is read on demand, which is cheap to pickle."""

    name: str  # for messages: the file, or the name in the row
    path: Path | None = None
    content: bytes | None = None
    root: ImageRoot | None = None  # the folders in which the file must be

    def read(self) -> bytes:
        """Return the encoded bytes; raises DataError for a file that cannot be read."""
        if self.content is not None:
            return self.content
        path = self.file()
        try:
            with open_regular(path) as stream:
                return stream.read()
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error

    def file(self) -> Path:
        """Return the file; raises DataError if it is outside of the root, not a regular file, or above MAX_BYTES."""
        assert self.path is not None
        try:
            path = self.path if self.root is None else self.root.resolve(self.path)
            size = require_regular(path).st_size
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataError(f"{self.path} does not exist") from error
        except (OSError, RuntimeError) as error:  # RuntimeError: a circular link, in Python 3.11
            raise DataError(f"{self.path} cannot be read: {getattr(error, 'strerror', error)}") from error
        if size > MAX_BYTES:
            raise DataError(f"{self.path} has {size:,} bytes, but the limit is {MAX_BYTES:,}")
        return path

    def digest(self) -> str:
        """Return a digest of the encoded bytes, independent of the name."""
        return hashlib.blake2b(self.read(), digest_size=16).hexdigest()


def stored_image(
    value: Any, *, folder: Path | None, title: str = "the image", root: ImageRoot | None = None
) -> StoredImage:
    """Return the image of a column; a relative path is relative to `folder`, None if the row has no folder.

    Does not read files. Raises DataError, which starts with the title, for a URL, for a path outside of the root, and
    for a value that cannot be an image.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return StoredImage(f"{len(value):,} bytes", content=bytes(value))
    if isinstance(value, dict) and not {"bytes", "path"}.isdisjoint(value):
        content, path = value.get("bytes"), value.get("path")
        if content is None and path is None:
            raise DataError(f"{title} has neither bytes nor a path.")
        if content is None:
            return stored_image(path, folder=folder, title=title, root=root)
        image = stored_image(content, folder=folder, title=title, root=root)
        return StoredImage(str(path), content=image.content) if path else image
    if isinstance(value, str):
        return _from_text(value, folder=folder, title=title, root=root)
    raise DataError(f"{title} must be a path, bytes, base64 or a `{{bytes, path}}` object, but is {describe(value)}.")


def folder_of(origin: str) -> Path | None:
    """Return the folder to which paths in rows of this origin are relative; None if it is not on this machine.

    >>> folder_of("/data/rows.jsonl"), folder_of("s3://bucket/rows.jsonl")
    (PosixPath('/data'), None)
    """
    path = Path(origin)
    if "://" in origin or not path.is_absolute():
        return None
    return path if path.is_dir() else path.parent


def _from_text(text: str, *, folder: Path | None, title: str, root: ImageRoot | None) -> StoredImage:
    if text.startswith("data:"):
        head, comma, body = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise DataError(f"{title} is a data URI that is not in base64.")
        return StoredImage("base64", content=_decoded(body, title=title))
    if "://" in text:
        raise DataError(
            f"{title} is a URL ({text[:80]}), but images are not downloaded during training. Download them and write "
            "their paths."
        )
    if not text.strip():
        raise DataError(f"{title} is empty.")
    if len(text) >= _MIN_BASE64_LENGTH and "." not in text:
        return StoredImage("base64", content=_decoded(text, title=title))
    if "\0" in text:
        raise DataError(f"{title} has a NUL character, which no path can contain.")
    path, base = Path(text), (root and root.counts_from) or folder
    if not path.is_absolute():
        if base is None:
            raise DataError(
                f"{title} is the relative path `{path}`, but its rows do not come from a local folder. Download rows "
                f"and images, or put the images' bytes into the rows."
            )
        path = base / path
    if root is not None:
        root.refuse_outside(path, title=title)
    return StoredImage(str(path), path=path, root=root)


def _decoded(text: str, *, title: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise DataError(f"{title} is neither a path with a suffix of images nor valid base64: {error}.") from error
