"""Checksums of samples, and what happens to a prepared set that is damaged on disk: it is quarantined."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from finetune.errors import DataError
from finetune.runtime.files.atomic import quarantine
from finetune.runtime.optional import no_op

_BITS = (1 << 64) - 1


def sample_checksum(arrays: Mapping[str, np.ndarray]) -> int:
    """Return the checksum of a sample's arrays: of their names, types and values.

    >>> both = sample_checksum({"a": np.arange(3), "b": np.arange(2)})
    >>> both == (sample_checksum({"a": np.arange(3)}) + sample_checksum({"b": np.arange(2)})) % 2**64
    True
    """
    return sum(_array_checksum(name, array) for name, array in arrays.items()) & _BITS


def sample_checksums(
    values: Mapping[str, np.ndarray], lengths: Mapping[str, np.ndarray], *, num_samples: int
) -> np.ndarray:
    """Return the checksums (uint64) of samples that lie end to end in the arrays."""
    total = np.zeros(num_samples, np.uint64)
    for name, array in values.items():
        ends = accumulate(lengths[name].tolist(), initial=0)
        total += np.array([_array_checksum(name, array[start:stop]) for start, stop in pairwise(ends)], np.uint64)
    return total


def _array_checksum(name: str, array: Any) -> int:
    return xxhash.xxh3_64_intdigest(array, _seed(name, array.dtype))


@lru_cache(maxsize=256)
def _seed(name: str, dtype: np.dtype[Any]) -> int:
    return xxhash.xxh3_64_intdigest(f"{name} {dtype.str}".encode())


class DamagedSet(DataError):
    """A prepared set on disk is not what was written."""

    def __init__(self, folder: Path, reason: str, *, title: str = "the prepared set") -> None:
        self.folder = folder
        self.reason = reason
        super().__init__(f"{title} {folder} is damaged: {reason}")


def quarantine_set(folder: Path, is_damaged: Callable[[], bool], *, log: Callable[[str], None]) -> Path | None:
    """Rename the folder where it still is damaged and return its new name; None where another process has seen to it.

    Raises DataError where it cannot be renamed, as in a cache that is only read here.
    """
    try:
        return quarantine(folder, is_damaged, log=log)
    except OSError as error:
        raise DataError(
            f"{folder} is damaged and cannot be set aside: {error.strerror or error}. Set data.cache_folder to a "
            "folder that can be written, or ask the owner of this one to delete the damaged set; it is then rebuilt."
        ) from error


def quarantined_copies(folder: Path) -> list[Path]:
    """Return what has been set aside of this folder and not been deleted since."""
    prefix = f".damaged-{folder.name}-"
    return sorted(path for path in folder.parent.iterdir() if path.name.startswith(prefix))


def format_damage(what: str, stores: Iterable[tuple[Path, Callable[[], bool]]]) -> tuple[str, ...]:
    """Return messages on damaged data that was delivered from these folders.

    Each comes with what tells whether it still is damaged on the disk; where it is, it is set aside.
    """
    damaged = [seen for folder, is_damaged in stores if (seen := _describe_damaged(folder, is_damaged))]
    if damaged:
        return what, *damaged
    return (
        f"{what}, but the copy on disk is intact: it was corrupted in the memory of a process. Run the same command "
        f"again: it resumes from the last checkpoint. If this happens again, test the memory of this machine.",
    )


def _describe_damaged(folder: Path, is_damaged: Callable[[], bool]) -> str | None:
    """Return what has become of a folder that is damaged, None of one that is not."""
    again = "Run the same command again: it rebuilds the set and resumes from the last checkpoint."
    try:
        aside = quarantine_set(folder, is_damaged, log=no_op)
    except DataError as error:
        return str(error)
    if aside is not None:
        return f"{folder} is set aside as {aside.name}. {again}"
    return None if folder.exists() else f"{folder} has been set aside by another process. {again}"
