"""A folder in object storage, through fsspec: whole files by their names relative to it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import fsspec

from finetune.runtime.optional import require

STORAGE_PACKAGES: Mapping[str, tuple[str, str]] = {
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "abfs": ("adlfs", "azure"),
    "az": ("adlfs", "azure"),
}
"""The package that knows a kind of storage, and the extra that brings it."""


class RemoteFolder:
    """A folder at a URL. Methods raise whatever the storage's package raises; nothing is cached between calls."""

    def __init__(self, url: str) -> None:
        """Raises MissingPackage where this kind of storage needs one that is not installed."""
        self.url = url.rstrip("/")
        scheme = url.partition("://")[0]
        if scheme in STORAGE_PACKAGES:
            package, extra = STORAGE_PACKAGES[scheme]
            require(package, extra=extra, purpose=f"run.folder at {scheme}://")
        self._storage: Any
        self._storage, self._root = fsspec.core.url_to_fs(self.url)

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file in the folder and below it; empty where there is no such folder."""
        self._storage.invalidate_cache()
        try:
            files = self._storage.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        start = len(self._root.strip("/")) + 1
        return {path.strip("/")[start:]: int(facts["size"]) for path, facts in files.items()}

    def read(self, name: str) -> bytes | None:
        """Return a file's content, None where there is none."""
        try:
            return bytes(self._storage.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def upload(self, path: Path, name: str) -> None:
        """Put the file there, over what was there before; object storage shows it whole or not at all."""
        self._storage.put_file(str(path), self._path(name))

    def download(self, name: str, path: Path) -> None:
        """Write the file to the path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._storage.get_file(self._path(name), str(path))

    def delete(self, names: Iterable[str]) -> None:
        """Delete the files; those that are gone already are passed over."""
        for name in names:
            try:
                self._storage.rm_file(self._path(name))
            except FileNotFoundError:
                continue

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
