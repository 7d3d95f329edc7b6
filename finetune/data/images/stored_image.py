"""What a row's image column may hold: a path, bytes, a `{bytes, path}` object, or text in base64; never a URL."""

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

_SHORTEST_BASE64 = 64

MAX_BYTES = 1 << 30
"""Bytes of the largest file that is read as an image."""


@dataclass(frozen=True)
class ImageRoot:
    """Where the files lie that rows may name as images; in no folder, they may name none."""

    folders: tuple[Path, ...]
    key: str  # of the source in the job YAML
    follow_links: bool = False
    counts_from: Path | None = None  # what relative paths count from; None: the folder of their rows

    def refuse_outside(self, path: Path, *, title: str) -> None:
        """Raise DataError for a path that leads out of all folders as it is written: `../x`, or an absolute one."""
        written = Path(os.path.normpath(path))
        is_inside = any(written.is_relative_to(folder.absolute()) for folder in self.folders)
        if not is_inside and not self._leads_inside(path):  # the same folder may have two names
            raise DataError(f"{title} is the path `{path}`, which is outside of {self._where()}. {self._remedy()}")

    def found(self, path: Path) -> Path:
        """Return where the path leads; raises DataError where a link leads out of all folders."""
        if not self.follow_links and not self._leads_inside(path):
            links = f"To read such images, set {self.key}.follow_links: true."
            raise DataError(f"{path} is a link to a file outside of {self._where()}. {links}")
        return path.resolve()

    def _leads_inside(self, path: Path) -> bool:
        target = path.resolve()
        return any(target.is_relative_to(folder.resolve()) for folder in self.folders)

    def _where(self) -> str:
        return " and ".join(map(str, self.folders)) or "the rows, which do not come from a local folder"

    def _remedy(self) -> str:
        return f"Write {self.key}.image_root: FOLDER, the folder that holds all images."


@dataclass(frozen=True)
class StoredImage:
    """An encoded image at hand, or in a file that is read whenever it is asked for: cheap to send about."""

    name: str  # for messages: the file, or what its row calls it
    path: Path | None = None
    content: bytes | None = None
    root: ImageRoot | None = None  # that the path has to lead into

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
        """Return the file; raises DataError for one outside of its root, of no end, or of more than MAX_BYTES."""
        assert self.path is not None
        try:
            path = self.path if self.root is None else self.root.found(self.path)
            size = require_regular(path).st_size
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataError(f"{self.path} does not exist") from error
        except (OSError, RuntimeError) as error:  # a link that leads to itself is a RuntimeError of Python 3.11
            raise DataError(f"{self.path} cannot be read: {getattr(error, 'strerror', error)}") from error
        if size > MAX_BYTES:
            raise DataError(f"{self.path} has {size:,} bytes, but the limit is {MAX_BYTES:,}")
        return path

    def digest(self) -> str:
        """Return a digest of the encoded bytes, whatever they are called."""
        return hashlib.blake2b(self.read(), digest_size=16).hexdigest()


def stored_image(
    value: Any, *, folder: Path | None, title: str = "the image", root: ImageRoot | None = None
) -> StoredImage:
    """Return the image that a column holds; a relative path counts from `folder`, None where there is none.

    Reads no file. Raises DataError, which begins with the title, for a URL, for a path out of the root, and for what
    can be no image.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return StoredImage(f"{len(value):,} bytes", content=bytes(value))
    if isinstance(value, dict) and not {"bytes", "path"}.isdisjoint(value):
        return _of_object(value, folder=folder, title=title, root=root)
    if isinstance(value, str):
        return _of_text(value, folder=folder, title=title, root=root)
    raise DataError(f"{title} must be a path, bytes, base64 or a `{{bytes, path}}` object, but is {describe(value)}.")


def folder_of(origin: str) -> Path | None:
    """Return the folder from which paths in rows of this origin count; None for what lies not on this machine.

    >>> folder_of("/data/rows.jsonl"), folder_of("s3://bucket/rows.jsonl")
    (PosixPath('/data'), None)
    """
    path = Path(origin)
    if "://" in origin or not path.is_absolute():
        return None
    return path if path.is_dir() else path.parent


def _of_object(value: dict[str, Any], *, folder: Path | None, title: str, root: ImageRoot | None) -> StoredImage:
    """Return what Hugging Face's image column holds: bytes and, next to or instead of them, a path."""
    content, path = value.get("bytes"), value.get("path")
    if content is None and path is None:
        raise DataError(f"{title} has neither bytes nor a path.")
    if content is None:
        return stored_image(path, folder=folder, title=title, root=root)
    found = stored_image(content, folder=folder, title=title, root=root)
    return StoredImage(str(path), content=found.content) if path else found


def _of_text(text: str, *, folder: Path | None, title: str, root: ImageRoot | None) -> StoredImage:
    if text.startswith("data:"):
        head, comma, body = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise DataError(f"{title} is a data URI that is not in base64.")
        return StoredImage("base64", content=_decoded(body, title=title))
    if "://" in text:
        raise DataError(
            f"{title} is a URL ({text[:80]}), and nothing is downloaded during training. Download the images and "
            f"write their paths."
        )
    if not text.strip():
        raise DataError(f"{title} is empty.")
    if len(text) >= _SHORTEST_BASE64 and "." not in text:
        return StoredImage("base64", content=_decoded(text, title=title))
    if "\0" in text:
        raise DataError(f"{title} has a NUL character, which no path can contain.")
    return _of_path(Path(text), folder=folder, title=title, root=root)


def _of_path(path: Path, *, folder: Path | None, title: str, root: ImageRoot | None) -> StoredImage:
    folder = (root and root.counts_from) or folder
    if not path.is_absolute():
        if folder is None:
            raise DataError(
                f"{title} is the relative path `{path}`, but its rows do not come from a local folder. Download rows "
                f"and images, or put the images' bytes into the rows."
            )
        path = folder / path
    if root is not None:
        root.refuse_outside(path, title=title)
    return StoredImage(str(path), path=path, root=root)


def _decoded(text: str, *, title: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise DataError(f"{title} is neither a path that ends as images do nor base64: {error}.") from error
