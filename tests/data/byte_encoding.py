"""An encoding that a spawned process can import without waiting for torch."""

import os
from dataclasses import dataclass
from multiprocessing import parent_process
from threading import Event

import numpy as np

from finetune.data.features import Features
from finetune.errors import DataError


def encode_bytes(rows):
    """Encode texts byte by byte; the text after `>` is the target."""
    return [_encode(row) for row in rows]


def _encode(row):
    data = np.frombuffer(row["text"].encode(), dtype=np.uint8).astype(np.uint32)
    if len(data) == 0:
        return None
    if row["text"] == "poison":
        return DataError("cannot be encoded.")
    return Features({"input_ids": data, "is_target": np.cumsum(data == ord(">")) > 0})


def encode_in_the_main_process_only(rows):
    """End the process at once, unless it is the main one."""
    if parent_process() is not None:
        os._exit(9)
    return encode_bytes(rows)


@dataclass(frozen=True)
class EncodeForever:
    """Never comes to an end, and holds a pipe open, so that the other side sees when this process is gone."""

    pipe: str

    def __call__(self, rows):
        with open(self.pipe, "w") as held:  # noqa: PTH123  # a FIFO
            held.write("begun\n")
            held.flush()
            Event().wait()


class AsWritten:
    """A format that reads rows as they are."""

    def read(self, raw):
        return raw.parse()


def flip(path, *, every=40, start=128, stop=None):
    """Flip a bit of one in so many bytes of the file, in its place, where others may have mapped it."""
    content = bytearray(path.read_bytes())
    for offset in range(start, stop or len(content), every):
        content[offset] ^= 1
    with path.open("r+b") as file:
        file.write(content)
