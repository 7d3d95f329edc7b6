"""The bytes of tensors that are alive, counted on a CPU as the caching allocator of a GPU counts them there."""

import weakref
from collections.abc import Iterator
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Counts the bytes of the storages that operations return in this context, until nothing refers to them.

    A storage counts once, however many views it has. Tensors from before the context count for nothing, unless their
    storage is resized in it (FSDP). What a kernel needs for itself alone is not seen. Fake tensors count as real ones.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.now = self.peak = 0
        self._tracked: dict[int, tuple[Any, int]] = {}  # by id: a weak reference to the storage, its bytes

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def __enter__(self) -> Self:
        self._patch = patch.object(torch.UntypedStorage, "resize_", _reporting(torch.UntypedStorage.resize_, self))
        self._patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]  # likewise
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # likewise
        self._patch.stop()

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # so that this mode sees what the DTensor makes of it
        named = named or {}
        before = {id(each) for each in storages((given, named))}
        outputs = operation(*given, **named)
        for storage in storages(outputs):
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


def storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storage of every tensor in a structure, of a wrapper those of its parts."""
    for each in tree_leaves(values):
        if isinstance(each, Tensor) and each.layout == torch.strided:
            yield from _storages_of(each)


def _storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):
                yield from _storages_of(part)
    elif tensor.device.type != "meta":
        yield tensor.untyped_storage()


def _reporting(resize: Any, live: LiveBytes) -> Any:
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        result = resize(storage, size)
        live.resized(storage, by=storage.nbytes() - before)
        return result

    return resize_
