"""The live bytes of a step by category and phase, counted on a CPU like a GPU's caching allocator, and its FLOPs.

`torch.distributed._tools.MemTracker` (2.13) counts the same bytes, but in twice the time, by module and without FLOPs.
The extrapolation over layers needs the peak of each phase.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS = "weights", "gradients", "optimizer", "activations"
GATHERED = "communication buffers"

_ATTENTION: Mapping[str, tuple[Callable[..., int], int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (sdpa_flop_count, 3),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flop_count, 4),
}
"""FLOP formulas of the CPU's attention operators, which torch 2.13 lacks, and the number of their input tensors."""

_GROUPED_PRODUCT = "aten::_grouped_mm"
"""The grouped matrix product of experts, for which torch 2.13 has no FLOP formula."""

_DEVICE = torch.ops.prim.device.default
"""The question for a fake tensor's device: two thirds of the operations of a step."""

_ATTENTION_PRODUCTS = ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention")


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Counts the bytes of the storages that operations return in this context, until they are freed.

    A storage counts once for all its views. Tensors from before the context do not count, unless their storage is
    resized in it (FSDP). Workspaces of kernels are not counted. Fake tensors count like real ones.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.now = self.peak = 0
        self._tracked: dict[int, tuple[Any, int]] = {}  # by id: a weak reference to the storage, its bytes

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            before = storage.nbytes()
            result = resize(storage, size)
            self.resized(storage, by=storage.nbytes() - before)
            return result

        self._patch = patch.object(torch.UntypedStorage, "resize_", resize_)
        self._patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]  # likewise
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # likewise
        self._patch.stop()

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # so that this mode sees the operations on local tensors
        if operation is _DEVICE:
            return given[0].device
        named = named or {}
        before = {id(storage) for storage in storages((given, named))}
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
    """Yield the storage of every tensor in a structure, or of its components for a wrapper."""
    if isinstance(values, Tensor):
        if values.layout == torch.strided:
            yield from _storages_of(values)
    elif isinstance(values, (tuple, list)):  # of an operator's arguments and outputs; pytree takes three times as long
        for value in values:
            yield from storages(value)
    elif isinstance(values, dict):
        yield from storages(tuple(values.values()))


def _storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):
                yield from _storages_of(part)
    elif tensor.device.type != "meta":
        yield tensor.untyped_storage()


class Tracer(LiveBytes):  # type: ignore[no-untyped-call]  # torch has no types for its base
    """Counts live bytes by category, with the peak of each phase and its categories, and FLOPs by phase.

    Allocations count as the current `category`. A storage that is resized is a gathered parameter of FSDP.
    """

    def __init__(self) -> None:
        super().__init__()
        self.category, self.phase = WEIGHTS, "start"
        self.flop_phase: str | None = None  # if FLOPs count as another phase
        self.held: Counter[str] = Counter()  # live bytes, by category
        self.peaks: dict[str, int] = {}  # by phase
        self.held_at_peak: dict[str, Mapping[str, int]] = {}
        self.transient_peaks: dict[str, int] = {}  # by phase, without weights, gradients and optimizer state
        self.flops: Counter[tuple[str, bool]] = Counter()  # by phase, and whether they belong to attention
        self._categories: dict[int, str] = {}

    @contextmanager
    def counting_as(self, category: str) -> Iterator[None]:
        """Count allocations in this context as this category."""
        before, self.category = self.category, category
        yield
        self.category = before

    def reclassify(self, tensor: Tensor, category: str) -> None:
        """Count the tensor's memory as this category from now on."""
        for storage in storages(tensor):
            _, size = self._tracked.get(id(storage), (None, 0))
            self.held[self._categories.get(id(storage), category)] -= size
            self._categories[id(storage)] = category
            self.held[category] += size

    def begin(self, phase: str) -> None:
        """Begin a phase, or continue one."""
        self.phase = phase
        self._note()

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if operation is _DEVICE:
            return super().__torch_dispatch__(operation, types, given, named)
        if _name(operation) == _GROUPED_PRODUCT and given[0].dtype != torch.bfloat16:
            outputs = super().__torch_dispatch__(partial(_grouped_product, operation), types, given, named)
        else:
            outputs = super().__torch_dispatch__(operation, types, given, named)
        if outputs is NotImplemented:
            return outputs
        # The FLOPs of the operation.
        name, phase = _name(operation), self.flop_phase or self.phase
        counted = flop_registry.get(getattr(operation, "_overloadpacket", None))
        if name == _GROUPED_PRODUCT:
            one, other = given[:2]
            self.flops[phase, False] += 2 * one.shape[-2] * one.shape[-1] * other.shape[-1]
        if name in _ATTENTION:
            formula, number = _ATTENTION[name]
            self.flops[phase, True] += formula(*(tensor.shape for tensor in given[:number]))
        elif counted is not None:
            is_attention = name.startswith(_ATTENTION_PRODUCTS)
            self.flops[phase, is_attention] += counted(*given, **(named or {}), out_val=outputs)
        return outputs

    def resized(self, storage: torch.UntypedStorage, *, by: int) -> None:
        """Count the change of a storage's size, which belongs to a gathered parameter."""
        with self.counting_as(GATHERED):
            super().resized(storage, by=by)

    def _track(self, storage: torch.UntypedStorage, size: int) -> None:
        self._categories[id(storage)] = self.category
        self.held[self.category] += size
        super()._track(storage, size)
        self._note()

    def _forget(self, key: int) -> None:
        _, size = self._tracked.get(key, (None, 0))
        category = self._categories.pop(key, None)
        if category is not None:
            self.held[category] -= size
        super()._forget(key)

    def _note(self) -> None:
        phase = self.phase
        if self.now > self.peaks.get(phase, -1):
            self.peaks[phase] = self.now
            self.held_at_peak[phase] = dict(self.held)
        transient = self.held[ACTIVATIONS] + self.held[GATHERED]
        self.transient_peaks[phase] = max(transient, self.transient_peaks.get(phase, 0))


def _name(operation: Any) -> str:
    return operation._schema.name if hasattr(operation, "_schema") else ""


def _grouped_product(operation: Any, one: Tensor, other: Tensor, *others: Any, **named: Any) -> Tensor:
    """Return a grouped product of any dtype: for fake tensors, torch 2.13 supports only bfloat16."""
    halves = (torch.empty_like(operand, dtype=torch.bfloat16) for operand in (one, other))
    product: Tensor = operation(*halves, *others, **named)
    return torch.empty_like(product, dtype=one.dtype)
