"""How much memory tensors take at most: counted on a CPU, as the caching allocator of a GPU counts it there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

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


def saved_bytes(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> int:
    """Return the bytes that the forward pass keeps for the backward pass, without the parameters."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model)
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in weights)
