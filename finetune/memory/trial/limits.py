"""The memory limits and peaks of a rank: of a GPU, or of resident memory and data segment of a process."""

import ctypes
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from finetune.runtime.resources import available_bytes, resident_bytes

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class MemoryLimit:
    """A memory limit of this process."""

    name: str  # for messages
    limit: int  # bytes of this process, including those in use
    used: Callable[[], int]
    start: Callable[[], Callable[[], int]]
    """Starts a measurement and returns a function for its peak, in total bytes."""


def memories(device: torch.device) -> tuple[MemoryLimit, ...]:
    """Return the memory limits of this rank; none if the device has no counters."""
    if device.type == "cpu":
        free = available_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # shared equally by a machine's ranks
        resident = MemoryLimit("memory", resident_bytes() + free, resident_bytes, _resident_peak)
        return (resident, *_data_segment())
    if device.type != "cuda":
        return ()
    # torch may allocate the free memory, and that which it has reserved
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    limit = min(free + torch.cuda.memory_reserved(device), int(share * total))
    used = partial(torch.cuda.memory_allocated, device)
    return (MemoryLimit("GPU memory", limit, used, partial(_device_peak, device)),)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error comes from an allocator of a device or of the host."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY_TEXTS)
    )


_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "out of memory", "bad_alloc", "Cannot allocate memory")


def release_freed_memory() -> None:
    """Make glibc return freed memory to the system, so that it does not count as used."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _device_peak(device: torch.device) -> Callable[[], int]:
    """Reset the peak: the caller has saved the counter."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)

    def peak() -> int:
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)

    return peak


def _resident_peak() -> Callable[[], int]:
    """If the peak of the process has not grown, the current resident memory counts, since malloc keeps freed memory.

    The kernel's counter is not reset, because a run reports it.
    """
    before = _peak_resident()

    def peak() -> int:
        after = _peak_resident()
        return after if after > before else resident_bytes()

    return peak


def _peak_resident() -> int:
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _data_segment() -> tuple[MemoryLimit, ...]:
    """Return the data segment if it is limited (`ulimit -d`); its size is a peak, since malloc keeps freed memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == resource.RLIM_INFINITY or not _status("VmData"):
        return ()
    used = partial(_status, "VmData")
    return (MemoryLimit("data segment (ulimit -d)", limit, used, lambda: used),)


def _status(name: str) -> int:
    """Return a value of /proc/self/status in bytes; 0 if it is missing."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    values = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(values[0]) if values else 0


MARGIN = 0.1
"""Share of the free memory that stays free, since batches of other shapes fragment it."""

MAX_GROWTH = 4
"""Maximum ratio of the next size to the largest measured one, unless the sizes to choose from grow faster."""

Peaks = tuple[int, ...]
"""The peak of each kind of memory on each rank, always in the same order."""


@dataclass(frozen=True)
class MemoryLimits:
    """The memory of all ranks: used by weights, gradients and states, and the limits."""

    used: Peaks
    limits: Peaks

    @property
    def targets(self) -> Peaks:
        """Return the limits minus the margin."""
        return tuple(
            int(limit - MARGIN * max(0, limit - used)) for used, limit in zip(self.used, self.limits, strict=True)
        )

    def holds(self, peaks: Peaks) -> bool:
        """Return whether the peaks leave the margin free on every rank."""
        return all(peak <= target for peak, target in zip(peaks, self.targets, strict=True))


Measured = Mapping[int, Peaks | None]
"""The peaks by tried size; None if it ran out of memory."""


def next_size(sizes: Sequence[int], measured: Measured, limits: MemoryLimits) -> int | None:
    """Return the next of the ascending sizes to try; None once the largest that fits is known."""
    if not measured:
        return sizes[0]
    top = largest_fitting(measured, limits)
    if top is None:
        return None
    too_large = min((size for size in measured if size > top), default=sizes[-1] + 1)
    larger = [size for size in sizes if top < size < too_large]
    options = [size for size in larger if size <= MAX_GROWTH * top] or larger[:1]
    fitting = [size for size in options if limits.holds(predict(size, measured, limits))]
    return max(fitting, default=None)


def largest_fitting(measured: Measured, limits: MemoryLimits) -> int | None:
    """Return the largest size that was measured to fit."""
    return max((size for size, peaks in measured.items() if peaks is not None and limits.holds(peaks)), default=None)


def predict(size: int, measured: Measured, limits: MemoryLimits) -> Peaks:
    """Return the expected peaks of a size that is larger than the measured ones."""
    known = sorted((size, peaks) for size, peaks in measured.items() if peaks is not None)
    peaks_by_limit = zip(*(peaks for _, peaks in known), strict=True)
    sizes = [size for size, _ in known]
    return tuple(
        _extrapolated(size, sizes, values, base=base) for values, base in zip(peaks_by_limit, limits.used, strict=True)
    )


def _extrapolated(size: int, sizes: Sequence[int], peaks: Sequence[int], *, base: int) -> int:
    slopes = [(high - low) / (b - a) for (a, low), (b, high) in pairwise(zip(sizes, peaks, strict=True))]
    steepest = max(slopes, default=0.0)
    if steepest <= 0:
        return base + max(0, peaks[-1] - base) * size // sizes[-1]
    if len(slopes) > 1 and slopes[-1] > _CURVED * slopes[-2]:
        quadratic = (size + sizes[-1]) / (
            sizes[-1] + sizes[-2]
        )  # the slope of the next segment of a parabola, relative to this one
        steepest = max(steepest, slopes[-1] * quadratic)
    return int(peaks[-1] + steepest * (size - sizes[-1]))


_CURVED = 1.2
"""Ratio of slopes above which memory is not linear: attention may be quadratic in the length."""
