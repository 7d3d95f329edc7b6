"""Checksums of samples, and quarantine of prepared sets that are damaged on disk."""

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
    """Return the checksum of the names, types and values of a sample's arrays.

    >>> both = sample_checksum({"a": np.arange(3), "b": np.arange(2)})
    >>> both == (sample_checksum({"a": np.arange(3)}) + sample_checksum({"b": np.arange(2)})) % 2**64
    True
    """
    return sum(_array_checksum(name, array) for name, array in arrays.items()) & _BITS


def sample_checksums(
    values: Mapping[str, np.ndarray], lengths: Mapping[str, np.ndarray], *, num_samples: int
) -> np.ndarray:
    """Return the checksums (uint64) of samples that are concatenated in the arrays."""
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
    """A prepared set has changed on disk since it was written."""

    def __init__(self, folder: Path, reason: str, *, title: str = "the prepared set") -> None:
        self.folder = folder
        self.reason = reason
        super().__init__(f"{title} {folder} is damaged: {reason}")


def quarantine_set(folder: Path, is_damaged: Callable[[], bool], *, log: Callable[[str], None]) -> Path | None:
    """Rename the folder if it is still damaged and return the new path; None if another process has done so.

    Raises DataError if it cannot be renamed, as in a read-only cache.
    """
    try:
        return quarantine(folder, is_damaged, log=log)
    except OSError as error:
        raise DataError(
            f"{folder} is damaged and cannot be renamed: {error.strerror or error}. Set data.cache_folder to a "
            "writable folder, or ask the owner of this one to delete the damaged set; it is then rebuilt."
        ) from error


def format_damage(damage: str, stores: Iterable[tuple[Path, Callable[[], bool]]]) -> tuple[str, ...]:
    """Return messages about damaged data that was delivered from these folders.

    Each folder comes with a function that checks whether it is damaged on disk; if it is, it is quarantined.
    """
    remedy = "Run the same command again: it rebuilds the set and resumes from the last checkpoint."
    quarantines = []
    for folder, is_damaged in stores:
        try:
            quarantined = quarantine_set(folder, is_damaged, log=no_op)
        except DataError as error:
            quarantines.append(str(error))
            continue
        if quarantined is not None:
            quarantines.append(f"{folder} is damaged and was renamed to {quarantined.name}. {remedy}")
        elif not folder.exists():
            quarantines.append(f"{folder} was damaged and renamed by another process. {remedy}")
    if quarantines:
        return damage, *quarantines
    return (
        f"{damage}, but the copy on disk is intact: it was corrupted in the memory of a process. Run the same command "
        f"again: it resumes from the last checkpoint. If this happens again, test the memory of this machine.",
    )
