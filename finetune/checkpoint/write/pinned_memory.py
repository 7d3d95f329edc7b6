"""Page-locked host memory of the size that is asked for.

torch's caching host allocator rounds every block up to a power of two (aten/src/ATen/core/CachingHostAllocator.h), so
4.1 GB of buffers would hold 8 GB of a machine's memory, uncounted. Here ordinary memory is registered with the driver.
"""

import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from finetune.errors import CheckpointError
from finetune.runtime.resources import format_size

PAGE_BYTES = mmap.PAGESIZE

Register = Callable[[int, int], None]
"""Page-locks the pages at an address, of this number of bytes; raises CheckpointError where the driver refuses."""


def pinned_size(size_bytes: int) -> int:
    """Return how much memory a buffer of this many bytes takes: whole pages, of which it locks its own only.

    >>> pinned_size(1) // PAGE_BYTES, pinned_size(8 * PAGE_BYTES) // PAGE_BYTES
    (2, 9)
    """
    return _whole_pages(size_bytes) + PAGE_BYTES


class PinnedMemory:
    """A flat buffer of bytes, zeroed and page-locked; it is unlocked when this object is deleted, so keep it."""

    def __init__(
        self, size_bytes: int, *, register: Register | None = None, unregister: Callable[[int], None] | None = None
    ) -> None:
        """`register` and `unregister` are the CUDA driver's by default."""
        locked_bytes = _whole_pages(size_bytes)
        memory = torch.empty(pinned_size(size_bytes), dtype=torch.uint8)
        start = -memory.data_ptr() % PAGE_BYTES
        # Zeroed first: registering commits the pages, and by one thread.
        self.bytes: Tensor = memory[start : start + locked_bytes].zero_()[:size_bytes]
        address = self.bytes.data_ptr()
        (register or _register)(address, locked_bytes)
        # The memory itself is bound to the call, so it lives until it has been unlocked.
        weakref.finalize(self, _unlock, unregister or _unregister, address, memory)


def _whole_pages(size_bytes: int) -> int:
    return max(1, -(-size_bytes // PAGE_BYTES)) * PAGE_BYTES


def _unlock(unregister: Callable[[int], None], address: int, memory: Tensor) -> None:
    unregister(address)


def _register(address: int, size_bytes: int) -> None:
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(driver.cudaHostRegister(address, size_bytes, 0))
    if code:
        raise CheckpointError(
            f"checkpoint.asynchronous: the driver does not page-lock {format_size(size_bytes)} of memory for the copies"
            f" (CUDA error {code}). Write `checkpoint.asynchronous: false`, so that training waits while checkpoints "
            "are written, or raise the limit of locked memory (`ulimit -l`)."
        )


def _unregister(address: int) -> None:
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    driver.cudaHostUnregister(address)
