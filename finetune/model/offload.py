"""Activations that wait for the backward pass in the host's memory instead of the device's.

What a module's forward pass saves is copied out on a stream of its own while the device goes on, and brought back one
tensor before it is wanted. Weights stay where they are, and so do tensors too small to be worth a copy.
"""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALLEST_BYTES = 1 << 20
"""Tensors below this stay: a copy of few bytes takes as long as one of many."""


class Kept:
    """One saved tensor in the host's memory, and its neighbour: what was saved before it is wanted after it."""

    def __init__(self, tensor: Tensor, lanes: "Lanes", before: "Kept | None") -> None:
        self._device, self._lanes = tensor.device, lanes
        self._before = None if before is None else ref(before)
        self._host = lanes.out(tensor)
        self._back: Tensor | None = None
        self._was_taken = False

    def foresee(self) -> None:
        """Begin to bring it back, unless it has been wanted before."""
        if not self._was_taken:
            self._fetch()

    def take(self) -> Tensor:
        """Return the tensor on its device, and begin to bring back the one that is wanted next."""
        back = self._fetch()
        self._back, self._was_taken = None, True
        self._lanes.join(back)
        neighbour = self._before() if self._before is not None else None
        if neighbour is not None:
            neighbour.foresee()
        return back

    def _fetch(self) -> Tensor:
        if self._back is None:
            self._back = self._lanes.back(self._host, self._device)
        return self._back


class Lanes:
    """Copies within one memory: what they do is seen on a machine without a GPU."""

    def out(self, tensor: Tensor) -> Tensor:
        """Return the tensor's values in the host's memory."""
        return tensor.detach().clone()

    def back(self, host: Tensor, device: torch.device) -> Tensor:
        """Return them on the device, where they will be once the lane is joined."""
        return host.to(device, copy=True)

    def join(self, tensor: Tensor) -> None:
        """Have the device's work wait until the tensor is there."""


class StreamLanes(Lanes):
    """Copies through pinned memory on a stream beside the device's work; the host never waits."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def out(self, tensor: Tensor) -> Tensor:
        """Return where the values will be; the device's memory is free for others once they are."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(self._stream)
        return host

    def back(self, host: Tensor, device: torch.device) -> Tensor:
        """Return where the values will be; the copy comes after all copies before it, its own way out among them."""
        with torch.cuda.stream(self._stream):
            return host.to(device, non_blocking=True)

    def join(self, tensor: Tensor) -> None:
        """Have the current stream wait for the copies that have been asked for by now."""
        torch.cuda.current_stream().wait_stream(self._stream)
        tensor.record_stream(torch.cuda.current_stream())


def offload_activations(
    model: nn.Module, *, lanes: Callable[[], Lanes] = StreamLanes, smallest_bytes: int = SMALLEST_BYTES
) -> None:
    """Have the model keep in the host's memory what each of its forward passes saves for the backward pass."""
    entered: list[saved_tensors_hooks] = []
    made: list[Lanes] = []

    def enter(module: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            made[:] = made or [lanes()]
            entered.append(_hooks(made[0], smallest_bytes=smallest_bytes))
            entered[-1].__enter__()

    def leave(*_: Any) -> None:
        if entered:
            entered.pop().__exit__()

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def _hooks(lanes: Lanes, *, smallest_bytes: int) -> saved_tensors_hooks:
    last: list[Kept] = []

    def pack(tensor: Tensor) -> Tensor | Kept:
        if tensor.numel() * tensor.element_size() < smallest_bytes or _is_weight(tensor):
            return tensor
        last[:] = [Kept(tensor, lanes, last[0] if last else None)]
        return last[0]

    return saved_tensors_hooks(pack, lambda kept: kept.take() if isinstance(kept, Kept) else kept)


def _is_weight(tensor: Tensor) -> bool:
    """Tell whether it is a parameter or a view of one, such as the transposed weight that a linear layer saves."""
    origin = tensor if tensor._base is None else tensor._base
    return isinstance(origin, nn.Parameter) or (origin.is_leaf and origin.requires_grad)
