"""A folder that takes the place of an older one at once."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.runtime.files import sync


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder that takes the place of `folder` at the end; an error leaves the older one as it was."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    older = staging.with_name(f"{staging.name}.older")
    try:
        yield staging
        staging.chmod(0o755)
        _sync_all(staging)
        if folder.exists():
            folder.replace(older)
        staging.replace(folder)
        sync(folder.parent)
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
        sync(path)
    sync(folder)
