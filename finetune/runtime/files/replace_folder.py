"""Replaces a folder atomically: readers see the old content or the new."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.runtime.files.atomic import REPLACED_SUFFIX, STALE_SECONDS_SHARED, fsync, remove_stale, temporary_path


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder that replaces `folder` at the end; after an error the old one is unchanged."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(folder.parent, seconds=STALE_SECONDS_SHARED)
    staging = temporary_path(folder)
    staging.mkdir(mode=0o700)
    older = staging.with_name(f"{staging.name}{REPLACED_SUFFIX}")
    try:
        yield staging
        staging.chmod(0o755)
        _sync_all(staging)
        if folder.exists():
            folder.replace(older)
        staging.replace(folder)
        fsync(folder.parent)
    except BaseException:
        if older.exists() and not folder.exists():
            older.replace(folder)
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(older, ignore_errors=True)


def _sync_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        fsync(path)
    fsync(folder)
