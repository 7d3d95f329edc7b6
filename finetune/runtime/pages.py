"""Memory in huge pages: the kernel makes one of 2 MiB several times as fast as 512 small ones."""

import ctypes
import mmap
import sys

from torch import Tensor

LARGE_BYTES = 4 << 20


def ask_for_huge_pages(tensor: Tensor) -> bool:
    """Have the memory of a large tensor on the CPU, which nobody has written to, made in huge pages if that can be.

    Return whether the kernel was asked and agreed; without it everything is the same, and slower.
    """
    size = tensor.numel() * tensor.element_size()
    if not sys.platform.startswith("linux") or tensor.device.type != "cpu" or size < LARGE_BYTES:
        return False
    first, last = tensor.data_ptr(), tensor.data_ptr() + size
    start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages of its own
    length = last // mmap.PAGESIZE * mmap.PAGESIZE - start
    advise = ctypes.CDLL(None).madvise
    return bool(advise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE) == 0)
