"""Activations: recomputed in the backward pass (gradient checkpointing), or offloaded to host memory.

`selective` checkpointing saves the results of matrix products and attention and recomputes the cheap rest (Korthikanti
et al., 2022, https://arxiv.org/abs/2205.05198).

Offloading copies the tensors that a forward pass saves to the host, and prefetches them before their use. Each saved
storage is copied only once, such as the common input of a layer's queries, keys and values. Copies run on a separate
CUDA stream through pinned memory; only a few tensors exist twice at a time. Weights, autocast's casts of weights, and
small tensors stay on the device.
"""

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.errors import ModelError

MIN_OFFLOAD_BYTES = 1 << 20
"""Smaller tensors stay on the device, since the latency of a copy dominates."""

MAX_LEAVING = 2
"""The maximum number of concurrent copies to the host; another one makes the device wait for the first."""

NUM_PREFETCHED = 2
"""Tensors that are prefetched in the backward pass."""


class Arrival(NamedTuple):
    """A tensor on the device, valid after its event."""

    tensor: Tensor
    event: Any


class CudaStreamCopies:
    """Copies through pinned memory on a separate CUDA stream, without host-device synchronization.

    All device memory belongs to the current stream, which waits for a copy's event before the memory is freed:
    `record_stream` would keep it until all work on the copy stream is done.
    """

    device_type = "cuda"

    def __init__(self) -> None:
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._leaving: deque[Arrival] = deque()
        self._arriving: dict[int, Arrival] = {}

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the pinned copy, which is filled asynchronously."""
        host = self._pinned(tensor)
        self._leaving.append(Arrival(tensor, self._copy(tensor, host)))
        self._release(keep=MAX_LEAVING)
        return host

    def to_device(self, host: Tensor, device: torch.device) -> Arrival:
        """Return the device tensor, which is filled asynchronously."""
        self._release(keep=0)
        tensor = torch.empty(host.shape, dtype=host.dtype, device=device)
        arrival = Arrival(tensor, self._copy(host, tensor))
        self._arriving[id(arrival)] = arrival
        return arrival

    def wait(self, arrival: Arrival) -> None:
        """Make the current stream wait for this copy, but not for later ones."""
        torch.cuda.current_stream().wait_event(arrival.event)
        self._arriving.pop(id(arrival), None)

    def finish(self) -> None:
        """Make the current stream wait for all copies, since a backward pass may not use all prefetched tensors."""
        self._release(keep=0)
        for arrival in list(self._arriving.values()):
            self.wait(arrival)

    def _pinned(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def _copy(self, source: Tensor, target: Tensor) -> Any:
        """Start a copy after all work queued on the current stream, and return the event of its completion."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def _release(self, *, keep: int) -> None:
        while len(self._leaving) > keep:
            torch.cuda.current_stream().wait_event(self._leaving.popleft().event)


class OffloadedStorage:
    """One storage in host memory. The backward pass needs storages in reverse order, so earlier ones are prefetched."""

    def __init__(
        self, tensor: Tensor, copies: CudaStreamCopies, previous: "OffloadedStorage | None", origin: Any
    ) -> None:
        self.num_uses = 0  # saved tensors that have not been used yet
        self._device, self._copies = tensor.device, copies
        self._previous = None if previous is None else ref(previous)
        self._host = copies.to_host(tensor)
        self._origin = origin  # kept alive, since its address is part of a key
        self._arrival: Arrival | None = None

    def prefetch(self, number: int) -> None:
        """Start copying back this storage and the previous ones, `number` in total, unless they have been used."""
        if self.num_uses > 0:
            self._start_fetch()
        previous = self._previous() if self._previous is not None else None
        if previous is not None and number > 1:
            previous.prefetch(number - 1)

    def fetch(self) -> Tensor:
        """Return the values on their device, and start copying back the next ones."""
        arrival = self._start_fetch()
        self._copies.wait(arrival)
        self.num_uses -= 1
        if self.num_uses <= 0:
            self._arrival = None
        self.prefetch(NUM_PREFETCHED + 1)
        return arrival.tensor

    def _start_fetch(self) -> Arrival:
        if self._arrival is None:
            self._arrival = self._copies.to_device(self._host, self._device)
        return self._arrival


@dataclass(frozen=True)
class OffloadedTensor:
    """A saved tensor as a view of its storage."""

    storage: OffloadedStorage
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class Offloading:
    """The hooks that autograd calls when it saves a tensor and before it uses it."""

    def __init__(self, model: nn.Module, copies: Any, *, smallest_bytes: int) -> None:
        self.copies, self._smallest_bytes = copies, smallest_bytes
        self._weights = WeightTest(model, smallest_bytes=smallest_bytes)
        self._offloaded: WeakValueDictionary[tuple[Any, ...], OffloadedStorage] = WeakValueDictionary()
        self._last: Callable[[], OffloadedStorage | None] = lambda: None

    def pack(self, tensor: Tensor) -> Tensor | OffloadedTensor:
        """Return the offloaded tensor, or the tensor itself if it stays on the device."""
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        is_large = is_plain and tensor.numel() * tensor.element_size() >= self._smallest_bytes
        if not is_large or tensor.device.type != self.copies.device_type or tensor.is_conj() or tensor.is_neg():
            return tensor
        if self._weights.is_weight(tensor):
            return tensor
        is_whole = _fills_its_storage(tensor)
        key, origin = _key(tensor, is_whole=is_whole)
        storage = self._offloaded.get(key)
        if storage is None:
            values = tensor.detach()
            values = values.as_strided((values.numel(),), (1,), 0) if is_whole else values
            storage = self._offloaded[key] = OffloadedStorage(values, self.copies, self._last(), origin)
            self._last = ref(storage)
        storage.num_uses += 1
        if is_whole:
            return OffloadedTensor(storage, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        contiguous_strides = torch.empty(tensor.shape, device="meta").stride()
        return OffloadedTensor(storage, tensor.shape, contiguous_strides, 0)

    def unpack(self, saved: Tensor | OffloadedTensor) -> Tensor:
        """Return the tensor on its device."""
        if isinstance(saved, OffloadedTensor):
            return saved.storage.fetch().as_strided(saved.shape, saved.strides, saved.offset)
        return saved


def offload_activations(
    model: nn.Module,
    *,
    copies: Callable[[], CudaStreamCopies] = CudaStreamCopies,
    smallest_bytes: int = MIN_OFFLOAD_BYTES,
) -> None:
    """Offload the tensors that the model's forward passes save for the backward pass to host memory."""
    entered: list[saved_tensors_hooks] = []
    started: list[Offloading] = []

    def enter(module: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            started[:] = started or [Offloading(model, copies(), smallest_bytes=smallest_bytes)]
            started[0].copies.finish()
            entered.append(saved_tensors_hooks(started[0].pack, started[0].unpack))
            entered[-1].__enter__()

    def leave(*_: Any) -> None:
        if entered:
            entered.pop().__exit__()

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


_CAST = "ToCopyBackward0"
# fmt: off
_VIEWS_AND_CASTS = frozenset({
    _CAST, "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0",
    "ReshapeAliasBackward0", "SelectBackward0", "SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0",
    "UnbindBackward0", "UnsqueezeBackward0", "SqueezeBackward1", "AliasBackward0", "ExpandBackward0",
    "AsStridedBackward0", "CloneBackward0",
})
# fmt: on


class WeightTest:
    """Detects whether a saved tensor is a parameter or buffer, a view of one, or a cast of one by autocast.

    The cast of a trained parameter is detected by its autograd graph. Casts of frozen parameters, and those saved by
    compiled code, have no graph; they have the shape of a parameter but another dtype.
    """

    def __init__(self, model: nn.Module, *, smallest_bytes: int) -> None:
        self._model, self._smallest_bytes = model, smallest_bytes
        self._dtypes: dict[torch.Size, set[torch.dtype]] = {}
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.ndim > 1:
                for shape in (parameter.shape, parameter.shape[::-1], parameter.shape[1:]):  # the last: of one expert
                    self._dtypes.setdefault(shape, set()).add(parameter.dtype)

    def is_weight(self, tensor: Tensor) -> bool:
        """Return whether the tensor is a weight."""
        origin = tensor if tensor._base is None else tensor._base
        if isinstance(origin, nn.Parameter) or (origin.is_leaf and origin.requires_grad):
            return True
        if origin.grad_fn is not None:
            node: Any = origin.grad_fn
            while node is not None and node.name() in _VIEWS_AND_CASTS:  # a chain of views and casts ends in a leaf
                node = node.next_functions[0][0]
            return node is not None and hasattr(node, "variable")
        dtypes = self._dtypes.get(origin.shape)
        is_cast = dtypes is not None and origin.is_floating_point() and origin.dtype not in dtypes
        storage = tensor.untyped_storage()
        return is_cast or any(
            buffer.untyped_storage()._cdata == storage._cdata
            for buffer in self._model.buffers()
            if type(buffer) is Tensor and buffer.numel() * buffer.element_size() >= self._smallest_bytes
        )


def _key(tensor: Tensor, *, is_whole: bool) -> tuple[tuple[Any, ...], Any]:
    """Return a key that is equal for saved tensors with equal values, and an object to keep while the key is used.

    The key is the storage, its version, and the part of it; for a cast, its source and dtype, since autocast casts the
    common input of queries, keys and values three times.
    """
    origin = tensor if tensor._base is None else tensor._base
    node = origin.grad_fn
    if is_whole and node is not None and node.name() == _CAST and origin.is_contiguous():
        source, number = node.next_functions[0]
        if source is not None:
            return (id(source), number, origin.dtype, origin.shape), source
    storage = tensor.untyped_storage()
    part = None if is_whole else (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    return (storage._cdata, tensor._version, part), StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _fills_its_storage(tensor: Tensor) -> bool:
    """Return whether the tensor contains every element of its storage exactly once, in any order."""
    ordered = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    count = 1
    for stride, size in ordered:
        if size != 1 and stride != count:
            return False
        count *= size
    return count * tensor.element_size() == tensor.untyped_storage().nbytes()


CheckpointingMode = bool | int | Literal["selective"]
"""True: every layer. A number n: every n-th layer. `selective`: the cheap operators of every layer."""

# fmt: off
_MATMUL_OPERATORS = frozenset({
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm", "aten::_grouped_mm",
    "aten::_scaled_grouped_mm", "transformers::grouped_mm_fallback", "bitsandbytes::gemm_4bit",
    "bitsandbytes::int8_scaled_mm", "bitsandbytes::int8_mixed_scaled_mm", "finetune::linear_plus_product",
})
_ATTENTION_OPERATORS = frozenset({
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable", "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward", "torch_attn::_varlen_attn",
    "flex_attention",
})
# fmt: on
_FLASH_ATTENTION_OPERATORS = re.compile(r"_?(vllm_)?flash_attn\w*::(_flash_attn_)?(varlen_)?(fwd|forward)")
"""Operators of the packages `flash_attn` (2 and 3) and of their hub builds, whose names end with a digest."""


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
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:  # transformers before 5.20; can be removed when pyproject.toml requires it
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    if mode is not True and isinstance(mode, int):
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if len(layers) < mode:
            raise ModelError(
                f"model.gradient_checkpointing: one of every {mode} layers is too many for "
                f"`{model.config.model_type}`, which has {len(layers)} layers. Write `true` or `selective`."
            )
        for index, layer in enumerate(layers):
            layer.gradient_checkpointing = index % mode == 0


def take_checkpointing(module: nn.Module) -> Callable[..., Any] | None:
    """Disable the module's own checkpointing and return its checkpoint function; None if it is not needed.

    transformers 5.17 checkpoints a layer outside its `forward`, 5.23 inside. With compiled code inside, `selective`
    saves results whose memory the compiled code overwrites: "has been mutated", with torch 2.11. Can be removed when
    pyproject.toml requires transformers 5.23.
    """
    is_outside = "__call__" in vars(GradientCheckpointingLayer)
    if not is_outside or not isinstance(module, GradientCheckpointingLayer) or not module.gradient_checkpointing:
        return None
    module.gradient_checkpointing = False
    recompute: Callable[..., Any] = module._gradient_checkpointing_func
    return recompute


@cache
def is_saved(operator: str) -> bool:
    """Return whether `selective` saves the results of an operator: of matrix products and attention.

    Operators are compared by name, since some are registered only when attention first runs.
    """
    name = operator.partition(".")[0]
    return name in _MATMUL_OPERATORS | _ATTENTION_OPERATORS or bool(_FLASH_ATTENTION_OPERATORS.fullmatch(name))


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_saved(operator.name()) else CheckpointPolicy.PREFER_RECOMPUTE
