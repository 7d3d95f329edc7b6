"""A checkpoint read on its own, tensor by tensor: no process group, no strategy, no pickle."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from finetune.checkpoint.find import Found, verify
from finetune.checkpoint.record import WHOLE, TensorRecord


@dataclass(frozen=True)
class OpenCheckpoint:
    """A verified checkpoint whose tensors are read from the disk when they are asked for."""

    found: Found
    records: Mapping[str, TensorRecord]  # by the name that the tensor is stored under
    progress: Mapping[str, Any]
    scalars: Mapping[str, Any]
    _files: Mapping[str, Path]

    def read(self, stored_name: str) -> Tensor:
        """Return the whole tensor, as it was saved."""
        with safe_open(self._files[stored_name], framework="pt", device="cpu") as file:
            tensor: Tensor = file.get_tensor(stored_name)
        record = self.records[stored_name]
        assert tensor.shape == record.shape, f"{stored_name} has the shape {list(tensor.shape)}, not {record.shape}"
        return tensor

    def model_records(self) -> list[TensorRecord]:
        """Return the trained parameters and the buffers, without the optimizer's state."""
        return [record for record in self.records.values() if record.key in WHOLE]


def open_checkpoint(path: Path) -> OpenCheckpoint:
    """Return the checkpoint in the folder, every file of it verified; raises CheckpointError for a bad one.

    Collective where a process group exists: ranks share out the files that are verified.
    """
    found = verify(path)
    saved = places(found)
    return OpenCheckpoint(
        found,
        records={name: record for name, (_, record) in saved.items()},
        progress=found.texts.progress,
        scalars=found.texts.scalars,
        _files={name: file for name, (file, _) in saved.items()},
    )


def places(found: Found) -> dict[str, tuple[Path, TensorRecord]]:
    """Return the file and the record of each tensor in the index, by the name that it is stored under."""
    return {name: (found.path / entry["file"], _record(entry)) for name, entry in found.texts.index.items()}


def _record(entry: Mapping[str, Any]) -> TensorRecord:
    return TensorRecord(name=entry["name"], key=entry["key"], shape=tuple(entry["shape"]), dtype=entry["dtype"])
