"""Disk space for checkpoints, and errors of the disk as messages that say what to do."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.errors import CheckpointError
from finetune.runtime.resources import format_size

SLACK_BYTES = 16 << 20
"""An upper bound for the files of a checkpoint besides its tensors."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def require_disk_space(folder: Path, num_bytes: int) -> None:
    """Raise CheckpointError if the folder's disk has no space for one more checkpoint of this size."""
    free, needed = shutil.disk_usage(folder).free, num_bytes + SLACK_BYTES
    if free < needed:
        raise CheckpointError(
            f"{folder}: a checkpoint needs {format_size(needed)}, but {format_size(free)} are free (an old one is "
            "deleted only after the new one was verified). Free disk space, lower checkpoint.keep_last, or set "
            "run.folder to another disk."
        )


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Raise a CheckpointError that says what to do in place of an OSError from writing."""
    try:
        yield
    except OSError as error:
        advice = ""
        if error.errno in _FULL:
            advice = (
                f" {format_size(_free_bytes(folder))} are free; earlier checkpoints are intact. Free disk space, lower "
                "checkpoint.keep_last, or set run.folder to another disk."
            )
        raise CheckpointError(f"cannot write {folder}: {error}.{advice}") from error


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
