"""What a row's image column may hold: a path, bytes, a `{bytes, path}` object, or text in base64; never a URL."""

import base64
import binascii
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.rows import describe
from finetune.errors import DataError

_SHORTEST_BASE64 = 64


@dataclass(frozen=True)
class StoredImage:
    """An encoded image at hand, or in a file that is read whenever it is asked for: cheap to send about."""

    name: str  # for messages: the file, or what its row calls it
    path: Path | None = None
    content: bytes | None = None

    def read(self) -> bytes:
        """Return the encoded bytes; raises DataError for a file that cannot be read."""
        if self.content is not None:
            return self.content
        assert self.path is not None
        try:
            return self.path.read_bytes()
        except FileNotFoundError as error:
            raise DataError(f"there is no file {self.path}") from error
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error

    def digest(self) -> str:
        """Return a digest of the encoded bytes, whatever they are called."""
        return hashlib.blake2b(self.read(), digest_size=16).hexdigest()


def stored_image(value: Any, *, folder: Path | None, title: str = "the image") -> StoredImage:
    """Return the image that a column holds; a relative path counts from `folder`, None where there is none.

    Reads no file. Raises DataError, which begins with the title, for a URL and for what can be no image.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return StoredImage(f"{len(value):,} bytes", content=bytes(value))
    if isinstance(value, dict) and not {"bytes", "path"}.isdisjoint(value):
        return _of_object(value, folder=folder, title=title)
    if isinstance(value, str):
        return _of_text(value, folder=folder, title=title)
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


def _of_object(value: dict[str, Any], *, folder: Path | None, title: str) -> StoredImage:
    """Return what Hugging Face's image column holds: bytes and, beside or instead of them, a path."""
    content, path = value.get("bytes"), value.get("path")
    if content is None and path is None:
        raise DataError(f"{title} has neither bytes nor a path.")
    if content is None:
        return stored_image(path, folder=folder, title=title)
    found = stored_image(content, folder=folder, title=title)
    return StoredImage(str(path), content=found.content) if path else found


def _of_text(text: str, *, folder: Path | None, title: str) -> StoredImage:
    if text.startswith("data:"):
        head, comma, body = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise DataError(f"{title} is a data URI that is not in base64.")
        return StoredImage("base64", content=_decoded(body, title=title))
    if "://" in text:
        raise DataError(
            f"{title} is a URL ({text[:80]}), and nothing is fetched while a model is trained. "
            "Download the images and write their paths."
        )
    if not text.strip():
        raise DataError(f"{title} is empty.")
    if len(text) >= _SHORTEST_BASE64 and "." not in text:
        return StoredImage("base64", content=_decoded(text, title=title))
    return _of_path(Path(text).expanduser(), folder=folder, title=title)


def _of_path(path: Path, *, folder: Path | None, title: str) -> StoredImage:
    if not path.is_absolute():
        if folder is None:
            raise DataError(
                f"{title} is the relative path `{path}`, and its rows are in no folder of this machine. "
                "Download rows and images, or have the images' bytes in the rows."
            )
        path = folder / path
    return StoredImage(str(path), path=path)


def _decoded(text: str, *, title: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise DataError(f"{title} is neither a path that ends as images do nor base64: {error}.") from error
