"""How much memory tensors take at most: counted on a CPU, as the caching allocator of a GPU counts it there."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations return in this context, until nothing refers to them.

    A storage counts once, however many views it has. Tensors from before the context count for nothing, unless their
    storage is resized in it (FSDP). What a kernel needs for itself alone is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._tracked: dict[int, tuple[Any, int]] = {}  # by id: a weak reference to the storage, its bytes

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def __enter__(self) -> "LiveBytes":
        self._patch = patch.object(torch.UntypedStorage, "resize_", _reporting(torch.UntypedStorage.resize_, self))
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # so that this mode sees what the DTensor makes of it
        named = named or {}
        before = {id(each) for each in _storages((given, named))}
        outputs = operation(*given, **named)
        for storage in _storages(outputs):
            if id(storage) not in before and id(storage) not in self._tracked:
                self._track(storage, storage.nbytes())
        return outputs

    def resized(self, storage: torch.UntypedStorage, *, by: int) -> None:
        """Count the change of a storage's size."""
        _, size = self._tracked.get(id(storage), (None, 0))
        self._forget(id(storage))
        self._track(storage, size + by)

    def _track(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)
        self._tracked[key] = weakref.ref(storage, lambda _: self._forget(key)), size
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        _, size = self._tracked.pop(key, (None, 0))
        self.now -= size


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


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for each in tree_leaves(values):
        if isinstance(each, Tensor) and each.layout == torch.strided:
            yield from _storages_of(each)


def _storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _storages_of(getattr(tensor, name))
    elif tensor.device.type != "meta":
        yield tensor.untyped_storage()


def _reporting(resize: Any, live: LiveBytes) -> Any:
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        result = resize(storage, size)
        live.resized(storage, by=storage.nbytes() - before)
        return result

    return resize_
