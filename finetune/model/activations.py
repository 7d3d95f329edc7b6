"""Less memory for activations.

Recompute them in the backward pass (gradient checkpointing), or offload them to the host.

`selective` checkpointing saves the results of matrix products and attention and recomputes the cheap rest
(Korthikanti et al., 2022, arXiv:2205.05198); random numbers are drawn again as before, so dropout is unchanged.
Offloading copies what a forward pass saves to pinned memory on a CUDA stream of its own and fetches it one tensor
ahead of its use. Weights, and tensors too small to be worth a copy, stay on the device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.errors import ModelError
from finetune.model.upstream import checkpoint_activations

CheckpointingMode = bool | int | Literal["selective"]
"""True: every layer. A number n: every n-th layer. `selective`: the cheap operators of every layer."""

_MATMUL_OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
_ATTENTION_OPERATORS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


def enable_gradient_checkpointing(model: PreTrainedModel, mode: CheckpointingMode) -> None:
    """Enable gradient checkpointing; raises ModelError for a model that does not support it.

    Non-reentrant, the only variant that works with both FSDP2 and frozen bases.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"model.gradient_checkpointing: `{model.config.model_type}` does not support it. Write `false`."
        )
    settings: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, saved_operators())
    checkpoint_activations(model, settings)
    if mode is not True and isinstance(mode, int):
        _checkpoint_every(model, mode)


def saved_operators() -> list[torch._ops.OpOverload]:
    """Return the operators whose results are saved: matrix products and attention, as far as this torch has them."""
    packets = [getattr(torch.ops.aten, name, None) for name in (*_MATMUL_OPERATORS, *_ATTENTION_OPERATORS)]
    return [packet.default for packet in packets if packet is not None]


def _checkpoint_every(model: PreTrainedModel, number: int) -> None:
    """Checkpoint one of every `number` layers, starting with the first."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if len(layers) < number:
        raise ModelError(
            f"model.gradient_checkpointing: one of every {number} layers is too many for "
            f"`{model.config.model_type}`, which has {len(layers)} layers. Write `true` or `selective`."
        )
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % number == 0


MIN_OFFLOAD_BYTES = 1 << 20
"""Smaller tensors stay on the device: copying a few bytes takes as long as copying many."""


class OffloadedTensor:
    """One saved tensor in host memory. The tensor saved before it is needed after it, so it is prefetched."""

    def __init__(self, tensor: Tensor, copies: "HostCopies", before: "OffloadedTensor | None") -> None:
        self._device, self._copies = tensor.device, copies
        self._before = None if before is None else ref(before)
        self._host = copies.to_host(tensor)
        self._fetched: Tensor | None = None
        self._is_used = False

    def prefetch(self) -> None:
        """Start copying it back, unless it has been used already."""
        if not self._is_used:
            self._start_fetch()

    def fetch(self) -> Tensor:
        """Return the tensor on its device, and start copying back the one that is needed next."""
        tensor = self._start_fetch()
        self._fetched, self._is_used = None, True
        self._copies.wait(tensor)
        neighbour = self._before() if self._before is not None else None
        if neighbour is not None:
            neighbour.prefetch()
        return tensor

    def _start_fetch(self) -> Tensor:
        if self._fetched is None:
            self._fetched = self._copies.to_device(self._host, self._device)
        return self._fetched


class HostCopies:
    """Copies within host memory: for tests on a machine without a GPU."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor in host memory."""
        return tensor.detach().clone()

    def to_device(self, host: Tensor, device: torch.device) -> Tensor:
        """Return the tensor on the device, valid after `wait`."""
        return host.to(device, copy=True)

    def wait(self, tensor: Tensor) -> None:
        """Have the device's work wait until the copy is done."""


class CudaStreamCopies(HostCopies):
    """Copies through pinned memory on a CUDA stream of their own; no host-device synchronisation."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the pinned copy, which is filled asynchronously; the device memory is released after that."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(self._stream)
        return host

    def to_device(self, host: Tensor, device: torch.device) -> Tensor:
        """Return the device tensor, which is filled asynchronously, in order after all copies before it."""
        with torch.cuda.stream(self._stream):
            return host.to(device, non_blocking=True)

    def wait(self, tensor: Tensor) -> None:
        """Have the current stream wait for the copies issued so far."""
        torch.cuda.current_stream().wait_stream(self._stream)
        tensor.record_stream(torch.cuda.current_stream())


def offload_activations(
    model: nn.Module, *, copies: Callable[[], HostCopies] = CudaStreamCopies, smallest_bytes: int = MIN_OFFLOAD_BYTES
) -> None:
    """Offload the tensors that the model's forward passes save for the backward pass to host memory."""
    entered: list[saved_tensors_hooks] = []
    started: list[HostCopies] = []

    def enter(module: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            started[:] = started or [copies()]
            entered.append(_hooks(started[0], smallest_bytes=smallest_bytes))
            entered[-1].__enter__()

    def leave(*_: Any) -> None:
        if entered:
            entered.pop().__exit__()

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def _hooks(copies: HostCopies, *, smallest_bytes: int) -> saved_tensors_hooks:
    last: list[OffloadedTensor] = []

    def pack(tensor: Tensor) -> Tensor | OffloadedTensor:
        if tensor.numel() * tensor.element_size() < smallest_bytes or _is_weight(tensor):
            return tensor
        last[:] = [OffloadedTensor(tensor, copies, last[0] if last else None)]
        return last[0]

    return saved_tensors_hooks(pack, lambda saved: saved.fetch() if isinstance(saved, OffloadedTensor) else saved)


def _is_weight(tensor: Tensor) -> bool:
    """Tell whether it is a parameter or a view of one, such as the transposed weight that a linear layer saves."""
    origin = tensor if tensor._base is None else tensor._base
    return isinstance(origin, nn.Parameter) or (origin.is_leaf and origin.requires_grad)
