"""Sets that are damaged: what is said of them, and how they are put out of the way, never deleted."""

import os
from collections.abc import Callable
from pathlib import Path

from finetune.errors import DataError
from finetune.runtime.files import set_aside


class DamagedSet(DataError):
    """What was prepared and kept on disk is no longer what was written."""

    def __init__(self, folder: Path, reason: str, *, title: str = "the prepared set") -> None:
        self.folder = folder
        self.reason = reason
        super().__init__(f"{title} {folder} is damaged: {reason}")


def put_aside(folder: Path, is_damaged: Callable[[], bool], *, say: Callable[[str], None]) -> Path | None:
    """Rename the folder where it still is damaged and return its new name; None where another process has seen to it.

    Raises DataError where it cannot be renamed, as in a cache that is only read here.
    """
    try:
        return set_aside(folder, is_damaged, say=say)
    except OSError as error:
        raise DataError(
            f"{folder} is damaged and cannot be set aside: {error.strerror or error}. Set data.cache_folder to a "
            "folder that can be written, or have whoever owns this one delete the damaged set; it is made again."
        ) from error


def damaged_copies(folder: Path) -> list[Path]:
    """Return what has been set aside of this folder and not been deleted since."""
    beside = folder.parent
    prefix = f".damaged-{folder.name}-"
    return sorted(beside / name for name in os.listdir(beside) if name.startswith(prefix)) if beside.is_dir() else []
