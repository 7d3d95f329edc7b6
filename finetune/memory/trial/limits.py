"""The memory that a rank may use and its peak: of a GPU, or resident memory and data segment of a process."""

import ctypes
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from finetune.runtime.resources import available_bytes, resident_bytes

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class MemoryLimit:
    """One kind of memory of this process."""

    name: str  # for messages
    limit: int  # bytes that this process may take, what it has by now included
    used: Callable[[], int]
    start: Callable[[], Callable[[], int]]
    """Begins a measurement and returns what returns its peak; bytes in all, not over what was there."""


def memories(device: torch.device) -> tuple[MemoryLimit, ...]:
    """Return the kinds of memory that this rank can run out of; none where the device has no counters."""
    if device.type == "cpu":
        return (*_resident(), *_data_segment())
    return _of_device(device) if device.type == "cuda" else ()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an allocator's, of a device or of the host."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in text for words in _REFUSALS)
    )


_REFUSALS = ("can't allocate memory", "out of memory", "bad_alloc", "Cannot allocate memory")


def release_freed_memory() -> None:
    """Have glibc return the memory that the start has freed to the system, so that it is not counted as used."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _of_device(device: torch.device) -> tuple[MemoryLimit, ...]:
    """Return the memory that torch may allocate on the GPU: what is free there, and what torch holds already."""
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    limit = min(free + torch.cuda.memory_reserved(device), int(share * total))
    return (
        MemoryLimit("GPU memory", limit, partial(torch.cuda.memory_allocated, device), partial(_device_peak, device)),
    )


def _device_peak(device: torch.device) -> Callable[[], int]:
    """Start at a peak of now: the caller has put the counter aside."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)

    def peak() -> int:
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)

    return peak


def _resident() -> tuple[MemoryLimit, ...]:
    """Return the resident memory, of which the ranks of a machine have an equal share of what is free."""
    free = available_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (MemoryLimit("memory", resident_bytes() + free, resident_bytes, _resident_peak),)


def _resident_peak() -> Callable[[], int]:
    """Where the process's own peak has not grown, what is resident now is the peak: malloc keeps what is freed.

    The kernel's counter is left as it is, because a run reports it.
    """
    before = _peak_resident()

    def peak() -> int:
        after = _peak_resident()
        return after if after > before else resident_bytes()

    return peak


def _peak_resident() -> int:
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _data_segment() -> tuple[MemoryLimit, ...]:
    """Return the data segment where it is limited (`ulimit -d`); malloc keeps what is freed, so its size is a peak."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == resource.RLIM_INFINITY or not _status("VmData"):
        return ()
    used = partial(_status, "VmData")
    return (MemoryLimit("data segment (ulimit -d)", limit, used, lambda: used),)


def _status(name: str) -> int:
    """Return a number of this process's status in bytes; 0 where the system has none."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(found[0]) if found else 0
