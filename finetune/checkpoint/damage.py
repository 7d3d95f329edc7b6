"""Which tensors of a damaged file are damaged, found by their own digests in the index, without torch."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from finetune.runtime.json_files import parse_json
from finetune.runtime.regular import open_regular

_BLOCK_BYTES = 8 << 20
_MOST_HEADER_BYTES = 100_000_000  # of the safetensors format


def damaged_tensors(path: Path, entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of the tensors whose values are not those that were saved.

    `entries` is what the index says of the tensors in the file. All of them count as damaged where the file cannot be
    read as safetensors, none where only the header's text differs.
    """
    try:
        with open_regular(path) as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            places: dict[str, Any] = parse_json(file.read(min(header_bytes, _MOST_HEADER_BYTES)))
            return [
                name for name in entries if _digest(file, places[name], 8 + header_bytes) != entries[name]["sha256"]
            ]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError):
        return list(entries)


def _digest(file: BinaryIO, place: Mapping[str, Any], start: int) -> str:
    first, last = place["data_offsets"]
    digest = hashlib.sha256()
    file.seek(start + first)
    missing = last - first
    while missing > 0 and (block := file.read(min(missing, _BLOCK_BYTES))):
        digest.update(block)
        missing -= len(block)
    return digest.hexdigest()
