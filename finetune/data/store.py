"""The prepared set on disk: flat arrays that are memory-mapped, opened in no time whatever their size.

NAME.values.npy    the samples' array NAME, end to end
NAME.offsets.npy   where each sample begins in it, and the end: one more than there are samples
num_targets.npy    targets of each sample
counts.json        what the set was made of, the names in order, and the counts of rows and tokens; written last
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch.utils.data import Dataset

from finetune.data.chunks import Chunk
from finetune.data.counts import Counts
from finetune.data.features import Features
from finetune.errors import DataError
from finetune.runtime.files import write_json

FORMAT_VERSION = 1
_MANIFEST = "counts.json"


class PreparedSet(Dataset[Features]):
    """Samples in the order of their rows, read from disk as they are asked for; safe to share with forked loaders."""

    def __init__(self, folder: Path) -> None:
        manifest = _read_manifest(folder)
        self.folder = folder
        self.fingerprint: str = manifest["fingerprint"]
        self.counts = _counts(folder, manifest["counts"])
        self._values = {name: _open(folder / f"{name}.values.npy") for name in manifest["names"]}
        self._offsets = {name: _open(folder / f"{name}.offsets.npy") for name in manifest["names"]}
        self.num_targets_each = _open(folder / "num_targets.npy")
        self.lengths: np.ndarray = np.diff(self._offsets[manifest["names"][0]])
        self._check()

    def __len__(self) -> int:
        return len(self.num_targets_each)

    def __getitem__(self, index: int) -> Features:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        arrays = {
            name: values[self._offsets[name][index] : self._offsets[name][index + 1]]
            for name, values in self._values.items()
        }
        return Features(arrays, sample_id=int(index))

    def lengths_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the tokens of each sample."""
        return np.asarray(self.lengths[sample_ids])

    def place(self, sample_id: int) -> str:
        """Return which sample it is, for a message."""
        return f"sample {sample_id}"

    def __reduce__(self) -> tuple[type["PreparedSet"], tuple[Path]]:
        return PreparedSet, (self.folder,)  # another process maps the files anew instead of being sent their content

    def _check(self) -> None:
        for name, offsets in self._offsets.items():
            if len(offsets) != len(self) + 1 or offsets[-1] != len(self._values[name]):
                raise _damaged(self.folder, f"{name} does not fit its offsets")


@dataclass(frozen=True)
class Identity:
    """What a prepared set was made of: the fingerprint and the parts that it is a digest of."""

    fingerprint: str
    parts: Mapping[str, Any]


def write_set(folder: Path, chunks: Iterable[Chunk], identity: Identity) -> Counts:
    """Write the chunks as a prepared set into an empty folder, one chunk at a time, and return their counts."""
    files: dict[str, _GrowingArray] = {}
    lengths: dict[str, list[np.ndarray]] = {}
    num_targets: list[np.ndarray] = []
    counts = Counts()
    try:
        for chunk in chunks:
            counts = counts.plus(chunk.counts)
            num_targets.append(chunk.num_targets)
            for name, values in chunk.values.items():
                if name not in files:
                    files[name] = _GrowingArray(folder / f"{name}.values.npy", values.dtype)
                files[name].append(values)
                lengths.setdefault(name, []).append(chunk.lengths[name])
    finally:
        for file in files.values():
            file.close()
    for name, each in lengths.items():
        _save(folder / f"{name}.offsets.npy", np.concatenate([[0], np.cumsum(np.concatenate(each))]).astype(np.int64))
    _save(folder / "num_targets.npy", np.concatenate([np.zeros(0, np.int64), *num_targets]))
    manifest = {"version": FORMAT_VERSION, "fingerprint": identity.fingerprint, "names": list(files)}
    write_json(folder / _MANIFEST, manifest | {"counts": asdict(counts), "made_of": dict(identity.parts)})
    return counts


class _GrowingArray:
    """An `.npy` file whose length is known only at the end; NumPy's header leaves room for it."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._file: BinaryIO = path.open("wb")
        self._dtype = dtype
        self._length = 0
        self._write_header()
        self._header_bytes = self._file.tell()

    def append(self, values: np.ndarray) -> None:
        if values.dtype != self._dtype:
            raise TypeError(f"{values.dtype} in an array of {self._dtype}")
        self._file.write(np.ascontiguousarray(values).data)
        self._length += len(values)

    def close(self) -> None:
        self._file.seek(0)
        self._write_header()
        assert self._file.tell() == self._header_bytes, "NumPy's header has outgrown its room"
        _sync_and_close(self._file)

    def _write_header(self) -> None:
        described = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._length,),
        }
        np.lib.format.write_array_header_1_0(self._file, described)


def _save(path: Path, array: np.ndarray) -> None:
    file = path.open("wb")
    np.save(file, array)
    _sync_and_close(file)


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        version, _ = manifest["version"], (manifest["fingerprint"], manifest["names"][0], manifest["counts"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise _damaged(folder, f"its {_MANIFEST} cannot be read") from error
    if version != FORMAT_VERSION:
        raise _damaged(folder, f"it has version {version} of the format, this program reads {FORMAT_VERSION}")
    return dict(manifest)


def _counts(folder: Path, values: dict[str, Any]) -> Counts:
    try:
        return Counts(**values)
    except TypeError as error:
        raise _damaged(folder, f"the counts in its {_MANIFEST} are not ours") from error


def _open(path: Path) -> np.ndarray:
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError) as error:
        raise _damaged(path.parent, f"{path.name} cannot be read: {error}") from error


def _damaged(folder: Path, reason: str) -> DataError:
    return DataError(
        f"the prepared set {folder} is damaged or not ours: {reason}. Delete that folder; it is made anew."
    )
