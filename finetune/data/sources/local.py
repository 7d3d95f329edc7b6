"""Files of rows on this machine: a file, a folder or a glob, with links followed only knowingly."""

import glob
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from finetune.config.sections.data import SourceSection
from finetune.data.sources.files import Files, is_readable, not_read, of_one_kind, require_readable
from finetune.data.sources.image_folder import find_image_folder
from finetune.data.sources.origin import Origin
from finetune.errors import DataError
from finetune.runtime.digests import file_digest
from finetune.runtime.regular import NotAFile, open_regular, require_regular


@dataclass(frozen=True)
class LocalPlace:
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


def find_local(section: SourceSection, *, key: str, say: Callable[[str], None]) -> Origin:
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
        found, base = _of_folder(path, key=key, say=say), path
    elif path.exists():
        if path.is_symlink():
            say(f"{key}.path: {path} is a link to {path.resolve()}")
        _require_file(path)
        found, base = [path], None
    else:
        base = _base(path)
        found = sorted(each for each in base.glob(str(path.relative_to(base))) if each.is_file())
    if not found:
        raise DataError(f"{path}: there is no such file. A relative path is resolved against the config file's folder.")
    for file in found:
        require_readable(str(file))
    if base is not None and not section.follow_links:
        _refuse_links_out(found, base, key=key)
    return Files(section.path, tuple(map(LocalPlace, found)), base or path.parent)


def _require_file(path: Path) -> None:
    """Raise DataError for a FIFO or a device: rows are read more than once, the first of them before all others."""
    try:
        require_regular(path)
    except NotAFile as error:
        raise DataError(f"{path}: {error.strerror}. Rows are read several times: write them to a file.") from error


def _has_rows(folder: Path) -> bool:
    return any(is_readable(each.name) and each.is_file() for each in folder.iterdir())


def _of_folder(folder: Path, *, key: str, say: Callable[[str], None]) -> list[Path]:
    entries = sorted(folder.iterdir())
    held, others = of_one_kind([str(each) for each in entries if each.is_file()], folder=str(folder))
    folders = [f"{each.name}/" for each in entries if each.is_dir() and not each.name.startswith(".")]
    unread = [*(Path(other).name for other in others), *folders]
    if unread:
        say(f"{key}.path: {folder} {not_read(unread)}")
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
                f"{file} is a link to {target}, outside of {base}. If its rows are meant, too, "
                f"set {key}.follow_links: true."
            )
