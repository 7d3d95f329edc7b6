"""Disk space for checkpoints, and errors of the disk as messages that say what to do."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.errors import CheckpointError
from finetune.runtime.resources import format_size

SLACK_BYTES = 16 << 20
"""What a checkpoint has besides its tensors, with room to spare."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def require_disk_space(folder: Path, num_bytes: int) -> None:
    """Raise CheckpointError where the folder's disk has no room for a checkpoint of this size besides those there."""
    free, needed = shutil.disk_usage(folder).free, num_bytes + SLACK_BYTES
    if free < needed:
        raise CheckpointError(
            f"{folder}: a checkpoint needs {format_size(needed)}, free are {format_size(free)} (an old one is deleted only "
            "after the new one has been verified). Make room, lower checkpoint.keep_last, or let run.folder be on "
            "another disk."
        )


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Turn what the system says of a write that failed into a CheckpointError that says what to do."""
    try:
        yield
    except OSError as error:
        advice = ""
        if error.errno in _FULL:
            advice = (
                f" Free are {format_size(_free_bytes(folder))}; the checkpoints before this one are as they were. Make room, "
                "lower checkpoint.keep_last, or let run.folder be on another disk."
            )
        raise CheckpointError(f"cannot write {folder}: {error}.{advice}") from error


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
