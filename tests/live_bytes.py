"""How much memory tensors take at most: counted on a CPU, as the caching allocator of a GPU counts it there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from finetune.memory.tracer import LiveBytes


@dataclass
class PeakMemory:
    """How many bytes were allocated at most over what was there when `peak_memory` began."""

    peak: int = 0


@contextmanager
def peak_memory(device: str | torch.device) -> Iterator[PeakMemory]:
    """Yield what has the peak of the context after its end: live bytes on a CPU, allocated bytes on a GPU."""
    found = PeakMemory()
    if torch.device(device).type == "cpu":
        with LiveBytes() as live:
            yield found
        found.peak = live.peak
        return
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield found
    torch.cuda.synchronize()
    found.peak = torch.cuda.max_memory_allocated() - before
