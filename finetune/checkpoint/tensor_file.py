"""Files in the safetensors format, written tensor by tensor and read row by row: no more than one is in memory."""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.checkpoint.manifest import FileFacts
from finetune.checkpoint.record import DTYPES, TensorRecord

_ALIGNMENT = 8


class TensorFile:
    """A safetensors file in the making: the records are known from the start, their values come in the same order.

    Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the values one by one).
    """

    def __init__(self, path: Path, records: Sequence[TensorRecord]) -> None:
        self._waiting = list(reversed(records))
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        self._file = path.open("xb")
        self._write(_header(records))

    def add(self, tensor: Tensor) -> str:
        """Write the next record's value and return its own SHA-256."""
        record = self._waiting.pop()
        flat = tensor.detach().cpu().to(DTYPES[record.dtype]).contiguous().reshape(-1)
        assert flat.numel() == record.num_elements, f"{record} got {flat.numel()} elements"
        values = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        self._write(values)
        return hashlib.sha256(values).hexdigest()

    def close(self) -> FileFacts:
        """Bring the file to the disk and return its size and the digest of what was meant to be written."""
        assert not self._waiting, f"{len(self._waiting)} tensors were not written"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileFacts(self._size_bytes, self._digest.hexdigest())

    def abandon(self) -> None:
        """Close the file as it is, also where there is no room for what is still to be flushed."""
        with suppress(OSError):
            self._file.close()

    def _write(self, values: bytes | memoryview) -> None:
        self._file.write(values)
        self._digest.update(values)
        self._size_bytes += len(values)


def read_span(file: Any, record: TensorRecord, *, start: int, stop: int) -> Tensor:
    """Return elements [start, stop) of the flattened tensor from an open safetensors file, reading only their rows."""
    if not record.shape:
        return file.get_tensor(record.stored_name).reshape(-1)[start:stop]  # type: ignore[no-any-return]
    row = math.prod(record.shape[1:])
    if start == stop or row == 0:
        return torch.empty(0, dtype=DTYPES[record.dtype])
    first, last = start // row, -(-stop // row)
    rows: Tensor = file.get_slice(record.stored_name)[first:last]
    return rows.reshape(-1)[start - first * row : stop - first * row]


def stored(whole: Tensor) -> dict[str, Tensor]:
    """Return the tensors, flat, as they lie in all bytes of a file: no copies."""
    size = int.from_bytes(bytes(whole[:8].tolist()), "little")
    entries = json.loads(bytes(whole[8 : 8 + size].tolist()))
    values = whole[8 + size :]
    return {
        name: values[slice(*entry["data_offsets"])].view(DTYPES[entry["dtype"]])
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def _header(records: Sequence[TensorRecord]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for record in records:
        place = [offset, offset + record.size_bytes]
        entries[record.stored_name] = {"dtype": record.dtype, "shape": list(record.shape), "data_offsets": place}
        offset += record.size_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
