"""An encoding that a spawned process can import without waiting for torch."""

import numpy as np

from finetune.data.features import Features
from finetune.errors import DataError


def encode_bytes(rows):
    """Encode texts byte by byte; what stands behind `>` is learnt."""
    return [_encode(row) for row in rows]


def _encode(row):
    data = np.frombuffer(row["text"].encode(), dtype=np.uint8).astype(np.uint32)
    if len(data) == 0:
        return None
    if row["text"] == "poison":
        return DataError("cannot be encoded.")
    return Features({"input_ids": data, "is_target": np.cumsum(data == ord(">")) > 0})
