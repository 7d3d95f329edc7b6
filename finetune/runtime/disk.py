"""What a disk refuses becomes one message, which says how much room there is."""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from finetune.errors import FULL, FinetuneError, disk_text
from finetune.runtime.amounts import size_text

_RUST = re.compile(r"Os \{ code: (\d+)|\(os error (\d+)\)")
"""How libraries in Rust (safetensors, tokenizers) tell the number of an error of the system."""


@contextmanager
def disk_errors(folders: Sequence[Path], kind: type[FinetuneError]) -> Iterator[None]:
    """Turn what a disk has refused to take into one error of this kind; `folders` are where things are written.

    Of a full disk the folders' free room is told; of anything else only what concerns these folders counts.
    """
    try:
        yield
    except FinetuneError:
        raise
    except Exception as error:
        refused = _of_system(error)
        text = None if refused is None else _text(refused, folders)
        if text is None:
            raise
        raise kind(text) from error


def room_text(folders: Sequence[Path]) -> str:
    """Return how much is free where the folders are."""
    return ", ".join(f"{folder} has {size_text(free_bytes(folder))} free" for folder in dict.fromkeys(folders))


def free_bytes(folder: Path) -> int:
    """Return what is free on the disk of a folder, which need not exist yet."""
    place = folder.absolute()
    return shutil.disk_usage(next(each for each in (place, *place.parents) if each.is_dir())).free


def _of_system(error: BaseException) -> OSError | None:
    """Return the system's error that this is, or that a library has made another one of."""
    if isinstance(error, OSError):
        return error
    found = _RUST.search(str(error))
    if found is None:
        return None
    number = int(found[1] or found[2])
    return OSError(number, os.strerror(number))


def _text(error: OSError, folders: Sequence[Path]) -> str | None:
    text = disk_text(error)
    if text is None:
        return None
    if error.errno in FULL:
        return f"{text} {room_text(folders)}. The same command continues once there is room."
    place = Path(str(error.filename)).absolute()
    is_ours = any(place.is_relative_to(folder.absolute()) for folder in folders)
    return f"{text} {_ADVICE}" if is_ours else None


_ADVICE = "Let this user write there, or name another folder (run.folder, data.cache_folder)."
