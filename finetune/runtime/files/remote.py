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
"""The package for a storage scheme, and the extra that installs it."""


class RemoteFolder:
    """A folder at a URL. Methods raise the errors of the storage's package; nothing is cached between calls."""

    def __init__(self, url: str) -> None:
        """Raises MissingPackage if the package for this storage is not installed."""
        self.url = url.rstrip("/")
        scheme = url.partition("://")[0]
        if scheme in STORAGE_PACKAGES:
            package, extra = STORAGE_PACKAGES[scheme]
            require(package, extra=extra, purpose=f"run.folder at {scheme}://")
        self._storage: Any
        self._storage, self._root = fsspec.core.url_to_fs(self.url)

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file in the folder, recursively; empty if the folder does not exist."""
        self._storage.invalidate_cache()
        try:
            files = self._storage.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        start = len(self._root.strip("/")) + 1
        return {path.strip("/")[start:]: int(facts["size"]) for path, facts in files.items()}

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None if it does not exist."""
        try:
            return bytes(self._storage.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def upload(self, path: Path, name: str) -> None:
        """Upload the file, replacing an existing one; object storage does this atomically."""
        self._storage.put_file(str(path), self._path(name))

    def download(self, name: str, path: Path) -> None:
        """Write the file to the path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._storage.get_file(self._path(name), str(path))

    def delete(self, names: Iterable[str]) -> None:
        """Delete the files; missing ones are skipped."""
        for name in names:
            try:
                self._storage.rm_file(self._path(name))
            except FileNotFoundError:
                continue

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
