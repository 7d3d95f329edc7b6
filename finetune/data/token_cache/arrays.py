"""1-D arrays in memory-mapped `.npy` files, verified block by block against the digests they were written with.

Large sets are verified by background threads from the moment they are opened.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field

from finetune.data.token_cache.integrity import BLOCK_BYTES, DIGEST_BYTES, num_blocks
from finetune.runtime.files.digests import Damaged, require_undamaged_file
from finetune.runtime.resources import usable_cores

_DIGEST_DIGITS = 2 * DIGEST_BYTES
_PIECE_BYTES = 256 << 10  # as much stays in a core's own cache


class ArrayFacts(BaseModel):
    """What an array was when it was written."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dtype: str
    length: int = Field(ge=0)
    digests: str  # of its blocks, in hexadecimal, end to end

    @property
    def size_bytes(self) -> int:
        """Return the bytes of its values."""
        return self.length * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Block:
    """A block of a file, to be read and compared."""

    array: "StoredArray"
    number: int

    def verify(self) -> None:
        """Raise Damaged unless it is as it was written."""
        self.array.verify_block(self.number)


class StoredArray:
    """The array of a file, read as it is asked for; raises Damaged where the file is not as the facts say.

    `values` is mapped from the very file that is verified, also when another one takes its name meanwhile.
    """

    def __init__(self, path: Path, facts: ArrayFacts) -> None:
        self._path = path
        self._facts = facts
        try:
            require_undamaged_file(path)
            self._file = path.open("rb")
            self._begins = self._read_header()
            self.values = self._mapped()
        except (OSError, ValueError) as error:
            raise Damaged(f"{path.name} cannot be read: {error}") from error

    @property
    def size_bytes(self) -> int:
        """Return the bytes of its values."""
        return self._facts.size_bytes

    def close(self) -> None:
        """Verify no more; the values can still be read."""
        self._file.close()

    def blocks(self) -> Iterator[Block]:
        """Yield what is to be verified."""
        yield from (Block(self, number) for number in range(num_blocks(self._facts.size_bytes)))

    def verify(self) -> None:
        """Raise Damaged unless every block is as it was written."""
        for block in self.blocks():
            block.verify()

    def verify_block(self, number: int) -> None:
        """Raise Damaged unless the block is as it was written; may be called by any thread."""
        start = number * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self._facts.size_bytes)
        written = self._facts.digests[number * _DIGEST_DIGITS : (number + 1) * _DIGEST_DIGITS]
        try:
            is_same = self._digest(self._begins + start, stop - start) == written
        except OSError as error:
            raise Damaged(f"{self._path.name} cannot be read: {error}") from error
        if not is_same:
            raise Damaged(f"{self._path.name} has changed between its bytes {start:,} and {stop:,}")

    def _digest(self, offset: int, size: int) -> str:
        """Return the digest of what the file holds there; read, not mapped: a bad sector is an error, not a signal."""
        digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_BYTES))
        while size > 0:
            num_read = os.preadv(self._file.fileno(), [buffer[: min(size, _PIECE_BYTES)]], offset)
            if num_read == 0:
                raise OSError("it is shorter than it was")
            digest.update(buffer[:num_read])
            offset, size = offset + num_read, size - num_read
        return digest.hexdigest()

    def _read_header(self) -> int:
        """Return where the values begin; raises ValueError for another header than the facts'."""
        try:
            np.lib.format.read_magic(self._file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(self._file)
        except Exception as error:  # a header is Python source: what a damaged one raises is anybody's guess
            raise ValueError(f"its header is damaged ({error})") from error
        if (shape, dtype.str) != ((self._facts.length,), self._facts.dtype):
            raise ValueError(f"it holds {shape} values of {dtype.str}")
        begins = self._file.tell()
        size = os.fstat(self._file.fileno()).st_size
        if size != begins + self._facts.size_bytes:
            raise ValueError(f"it has {size:,} bytes, and had {begins + self._facts.size_bytes:,}")
        return begins

    def _mapped(self) -> np.ndarray:
        whole = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(whole, np.dtype(self._facts.dtype), count=self._facts.length, offset=self._begins)


def open_arrays(
    folder: Path, facts: Mapping[str, ArrayFacts], *, verified: Callable[[str], bool]
) -> dict[str, StoredArray]:
    """Return the arrays of the folder by name, some of them verified; raises Damaged."""
    arrays = {name: StoredArray(folder / f"{name}.npy", each) for name, each in facts.items()}
    for name, array in arrays.items():
        if verified(name):
            array.verify()
    return arrays


MAX_THREADS = 4
"""Digests are made as fast as memory is read: more threads gain nothing."""


class Verification:
    """Reads all blocks of the arrays once; the first that is damaged ends it."""

    def __init__(self, arrays: Sequence[StoredArray]) -> None:
        self._arrays = arrays
        self._problem: str | None = None
        self._lock = threading.Lock()
        self._all = tuple(block for array in arrays for block in array.blocks())
        self._blocks: Iterator[tuple[int, Block]] = iter(enumerate(self._all))
        self.number = -1  # of the block that is damaged
        self._threads: list[threading.Thread] = []

    @property
    def problem(self) -> str | None:
        """Return what has been found to be damaged so far."""
        return self._problem

    @property
    def size_bytes(self) -> int:
        """Return how many bytes there are to be read."""
        return sum(array.size_bytes for array in self._arrays)

    def verify_only(self, number: int) -> None:
        """Read one block; raises Damaged."""
        self._all[number].verify()
        self.close()

    def run(self) -> None:
        """Read them all in this thread."""
        self._verify()
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        for array in self._arrays:
            array.close()

    def start(self) -> None:
        """Begin, and return at once."""
        num_threads = max(1, min(MAX_THREADS, usable_cores() - 1))
        self._threads = [threading.Thread(target=self._verify, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all is verified or something is found to be damaged; return whether that is so by then."""
        end = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        is_over = not any(thread.is_alive() for thread in self._threads)
        if is_over:
            self.close()
        return is_over

    def _verify(self) -> None:
        while self._problem is None:
            with self._lock:
                number, block = next(self._blocks, (-1, None))
            if block is None:
                return
            try:
                block.verify()
            except Damaged as damage:
                self.number, self._problem = number, str(damage)
