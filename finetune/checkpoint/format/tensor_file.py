"""Tensors in safetensors files: the record of each; files are written tensor by tensor and read row by row."""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.checkpoint.format.manifest import FileChecksum

PARAMETER = "parameter"
"""The key of a parameter's own value; other keys are optimizer state (`exp_avg`, `momentum_buffer`, ...)."""

BUFFER = "buffer"
"""The key of a persistent buffer's value."""

MODEL_KEYS = frozenset({PARAMETER, BUFFER})
"""Keys of the tensors of a model; all others belong to the optimizer."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes by their safetensors names."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of the training state, independent of how it is sharded."""

    name: str  # canonical name of the parameter or buffer
    key: str  # PARAMETER, BUFFER or the key in the optimizer's state
    shape: tuple[int, ...]
    dtype: str  # a key of DTYPES

    @property
    def stored_name(self) -> str:
        """Return the name in the file: the parameter's own, or `<parameter>/<key of its optimizer state>`."""
        return self.name if self.key in MODEL_KEYS else f"{self.name}/{self.key}"

    @property
    def part(self) -> str:
        """Return the folder of the checkpoint in which it is stored."""
        return "model" if self.key in MODEL_KEYS else "optimizer"

    @property
    def num_elements(self) -> int:
        """Return the number of elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Return the size of the full tensor."""
        return self.num_elements * DTYPES[self.dtype].itemsize


def dtype_code(dtype: torch.dtype) -> str:
    """Return the safetensors name of the dtype; raises KeyError for a dtype without one."""
    return _CODES[dtype]


class TensorFile:
    """Writes a safetensors file: the records are known at the start, and values are added in their order.

    Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the values in sequence).
    """

    def __init__(self, path: Path, records: Sequence[TensorRecord]) -> None:
        self._missing = list(reversed(records))
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        self._file = path.open("xb")
        self._write(_header(records))

    def add(self, tensor: Tensor) -> str:
        """Write the value of the next record and return its SHA-256."""
        record = self._missing.pop()
        flat = tensor.detach().cpu().to(DTYPES[record.dtype]).contiguous().reshape(-1)
        assert flat.numel() == record.num_elements, f"{record} got {flat.numel()} elements"
        values = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        self._write(values)
        return hashlib.sha256(values).hexdigest()

    def close(self) -> FileChecksum:
        """Fsync the file and return size and SHA-256 of the written data."""
        assert not self._missing, f"{len(self._missing)} tensors were not written"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileChecksum(self._size_bytes, self._digest.hexdigest())

    def abandon(self) -> None:
        """Close the incomplete file, ignoring errors of a full disk."""
        with suppress(OSError):
            self._file.close()

    def _write(self, values: bytes | memoryview) -> None:
        self._file.write(values)
        self._digest.update(values)
        self._size_bytes += len(values)


def read_range(file: Any, record: TensorRecord, *, start: int, stop: int) -> Tensor:
    """Return elements [start, stop) of the flattened tensor from an open safetensors file, reading only their rows."""
    if not record.shape:
        return file.get_tensor(record.stored_name).reshape(-1)[start:stop]  # type: ignore[no-any-return]
    row = math.prod(record.shape[1:])
    if start == stop or row == 0:
        return torch.empty(0, dtype=DTYPES[record.dtype])
    first, last = start // row, -(-stop // row)
    rows: Tensor = file.get_slice(record.stored_name)[first:last]
    return rows.reshape(-1)[start - first * row : stop - first * row]


def parse_safetensors(content: Tensor) -> dict[str, Tensor]:
    """Return the tensors in the bytes of a safetensors file, flat and without copying."""
    size = int.from_bytes(bytes(content[:8].tolist()), "little")
    entries = json.loads(bytes(content[8 : 8 + size].tolist()))
    values = content[8 + size :]
    return {
        name: values[slice(*entry["data_offsets"])].view(DTYPES[entry["dtype"]])
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def _header(records: Sequence[TensorRecord]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for record in records:
        offsets = [offset, offset + record.size_bytes]
        entries[record.stored_name] = {"dtype": record.dtype, "shape": list(record.shape), "data_offsets": offsets}
        offset += record.size_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
