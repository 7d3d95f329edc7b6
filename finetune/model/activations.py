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

CheckpointingMode = bool | int | Literal["selective"]
"""True: every layer. A number n: every n-th layer. `selective`: in every layer, what is cheap."""

_MATMUL_OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
_ATTENTION_OPERATORS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


def enable_gradient_checkpointing(model: PreTrainedModel, wish: CheckpointingMode) -> None:
    """Have the model recompute activations; raises ModelError for one that cannot.

    Without reentrance, the only way that FSDP2 and frozen bases both allow.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"model.gradient_checkpointing: `{model.config.model_type}` does not support it. Write `false`."
        )
    settings: dict[str, Any] = {"use_reentrant": False}
    if wish == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, saved_operators())
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:  # transformers before 5.20 or so; may go when pyproject.toml asks for a newer one
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    if wish is not True and isinstance(wish, int):
        _checkpoint_every(model, wish)


def saved_operators() -> list[torch._ops.OpOverload]:
    """Return the operators whose results are kept: matrix products and attention, as far as this torch has them."""
    packets = [getattr(torch.ops.aten, name, None) for name in (*_MATMUL_OPERATORS, *_ATTENTION_OPERATORS)]
    return [packet.default for packet in packets if packet is not None]


def _checkpoint_every(model: PreTrainedModel, number: int) -> None:
    """Recompute the first of so many layers, then the next one after them, and so on."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if len(layers) < number:
        raise ModelError(
            f"model.gradient_checkpointing: {number} means one of so many layers, and `{model.config.model_type}` has "
            f"{len(layers)} that can recompute. Write `true` or `selective`."
        )
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % number == 0


MIN_OFFLOAD_BYTES = 1 << 20
"""Tensors below this stay: a copy of few bytes takes as long as one of many."""


class OffloadedTensor:
    """One saved tensor in the host's memory, and its neighbour: what was saved before it is wanted after it."""

    def __init__(self, tensor: Tensor, lanes: "HostCopies", before: "OffloadedTensor | None") -> None:
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


class HostCopies:
    """Copies within one memory: what they do is seen on a machine without a GPU."""

    def out(self, tensor: Tensor) -> Tensor:
        """Return the tensor's values in the host's memory."""
        return tensor.detach().clone()

    def back(self, host: Tensor, device: torch.device) -> Tensor:
        """Return them on the device, where they will be once the lane is joined."""
        return host.to(device, copy=True)

    def join(self, tensor: Tensor) -> None:
        """Have the device's work wait until the tensor is there."""


class CudaStreamCopies(HostCopies):
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
    model: nn.Module, *, copies: Callable[[], HostCopies] = CudaStreamCopies, smallest_bytes: int = MIN_OFFLOAD_BYTES
) -> None:
    """Have the model keep in the host's memory what each of its forward passes saves for the backward pass."""
    entered: list[saved_tensors_hooks] = []
    made: list[HostCopies] = []

    def enter(module: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            made[:] = made or [copies()]
            entered.append(_hooks(made[0], smallest_bytes=smallest_bytes))
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

    return saved_tensors_hooks(pack, lambda kept: kept.take() if isinstance(kept, OffloadedTensor) else kept)


def _is_weight(tensor: Tensor) -> bool:
    """Tell whether it is a parameter or a view of one, such as the transposed weight that a linear layer saves."""
    origin = tensor if tensor._base is None else tensor._base
    return isinstance(origin, nn.Parameter) or (origin.is_leaf and origin.requires_grad)
