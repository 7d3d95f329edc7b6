"""CPU tensors that count as those of a GPU: with where they are, and with what makes the host wait for them.

Backward passes of fake tensors (`FakeTensorMode`) of device `cuda` abort on a CPU build of torch, and raise on a CUDA
build without a GPU (2.14.1). Here every tensor is real and in host memory; a storage has a mark if it counts as a
GPU's. Operators run on the CPU, backward passes included, and their results are marked as those of a GPU would be.
"""

import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self
from unittest.mock import patch

import torch
import torch._dynamo.eval_frame
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves

from tests.fake_gpu.streams import HOST, Block, Timeline

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")

PACKAGE = str(Path(__file__).parents[2] / "finetune")

_READ = "waits for the GPU: its result goes to the host"
_PAGEABLE = "waits for a copy to the GPU: the source is not in page-locked memory"
_BLOCKING = "waits for a copy to the GPU: without non_blocking"
_TO_HOST = "waits for a copy to the host: without non_blocking"


@dataclass(frozen=True)
class Finding:
    """An operation for which the host waits, and the innermost function of the package that called it."""

    operation: str
    effect: str
    caller: str

    def __str__(self) -> str:
        return f"{self.caller}: {self.operation} {self.effect}"


class FakeGpu(TorchDispatchMode):
    """In this context, tensors are on a GPU if they were sent to one, created on one, or computed from one's.

    A tensor of the GPU and one of the CPU in one operation raise RuntimeError, as on a GPU. What makes the host wait is
    collected in `findings` while `is_watching`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.findings: dict[Finding, int] = {}
        self.is_watching = False
        self.num_operations = 0  # that touched the GPU
        self.timeline = Timeline()
        self.goes_to_host = False  # what is copied now
        self.makes_on_gpu = False  # what an operator makes that C++ calls now
        self._waits = False  # whether the host waits for the operation that is being queued
        self.registered: list[tuple[int, int]] = []  # address and bytes of memory that the driver has page-locked
        self._marked: dict[int, tuple[weakref.ref[Any], Block]] = {}
        self._pinned: dict[int, tuple[weakref.ref[Any], Block]] = {}

    @contextmanager
    def watching(self, is_watching: bool = True) -> Iterator[None]:
        before, self.is_watching = self.is_watching, is_watching
        try:
            yield
        finally:
            self.is_watching = before

    def __enter__(self) -> Self:
        self._patches = ExitStack()
        for owner, name, replacement in _replacements(self):
            self._patches.enter_context(patch.object(owner, name, replacement))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def is_on_gpu(self, tensor: Tensor) -> bool:
        """Tell where a tensor is; a wrapper is where its parts are."""
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            parts = (getattr(tensor, name) for name in names)
            return any(self.is_on_gpu(part) for part in parts if isinstance(part, Tensor))
        return _has_storage(tensor) and id(tensor.untyped_storage()) in self._marked

    def is_pinned(self, tensor: Tensor) -> bool:
        if not _has_storage(tensor):
            return False
        if id(tensor.untyped_storage()) in self._pinned:
            return True
        address = tensor.data_ptr() if self.registered else 0
        if any(start <= address < start + size for start, size in self.registered):
            self.pinned(tensor)
            return True
        return False

    def on_gpu(self, tensor: Tensor) -> Tensor:
        """Mark the tensor's storage as a GPU's and return the tensor."""
        return self._mark(tensor, self._marked, self.timeline.new_block())

    def pinned(self, tensor: Tensor) -> Tensor:
        """Mark the tensor's storage as page-locked and return the tensor."""
        return self._mark(tensor, self._pinned, Block(HOST))

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Take the place of `Tensor.record_stream`."""
        self._marked[id(tensor.untyped_storage())][1].recorded.add(stream.name)

    def _mark(self, tensor: Tensor, marked: dict[int, tuple[weakref.ref[Any], Block]], block: Block) -> Tensor:
        storage, timeline = tensor.untyped_storage(), self.timeline
        key = id(storage)

        def free(_: Any) -> None:
            if marked.pop(key, None) is not None:
                timeline.free(block)

        marked[key] = weakref.ref(storage, free), block
        return tensor

    def block_of(self, tensor: Tensor) -> Block | None:
        """Return the block of a tensor of the GPU or in page-locked memory; the host alone uses any other."""
        if not _has_storage(tensor):
            return None
        key = id(tensor.untyped_storage())
        entry = self._marked.get(key) or (self._pinned.get(key) if self.is_pinned(tensor) else None)
        return None if entry is None else entry[1]

    def read_by_host(self, tensor: Tensor) -> None:
        """Have the host read a tensor without an operator."""
        block = self.block_of(tensor)
        if block is not None:
            self.timeline.work("a read by the host", reads=[block], writes=[], stream=HOST)

    def report(self, operation: str, effect: str) -> None:
        self._waits = True
        if self.is_watching:
            finding = Finding(operation, effect, _caller())
            self.findings[finding] = self.findings.get(finding, 0) + 1

    def __torch_dispatch__(self, operator: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # so that this mode sees the operations on local tensors
        named = dict(named or {})
        tensors = [leaf for leaf in tree_leaves((given, named)) if isinstance(leaf, Tensor)]
        name, target = operator._schema.name, named.get("device")
        is_symbolic = any(isinstance(tensor, FakeTensor) or tensor.device.type == "meta" for tensor in tensors)
        if is_symbolic and not _is_cuda(target):
            return operator(*given, **named)
        if target is not None:
            named["device"] = CPU if _is_cuda(target) else target
        pins = bool(named.pop("pin_memory", False)) and "pin_memory" in operator._schema.__str__()
        on_gpu = [tensor for tensor in tensors if self.is_on_gpu(tensor)]
        if name in ("aten::_to_copy", "aten::copy_"):
            result = self._copy(operator, given, named, target=target)
        elif name == "aten::_pin_memory":
            return self.pinned(given[0].clone())
        elif name == "aten::is_pinned":
            return self.is_pinned(given[0])
        else:
            self._check(operator, name, given, named, tensors=tensors, on_gpu=on_gpu)
            before = {id(tensor.untyped_storage()) for tensor in tensors if _has_storage(tensor)}
            result = _STAND_INS.get(name, operator)(*given, **named)
            # An operator that C++ calls has the options of another tensor, whose device is the CPU in truth.
            is_made_there = not tensors and (self.makes_on_gpu or _calls_cpp())
            is_result_there = bool(on_gpu) or _is_cuda(target) or is_made_there
            for tensor in tree_leaves(result):
                is_new = isinstance(tensor, Tensor) and _has_storage(tensor)
                if is_new and id(tensor.untyped_storage()) not in before and is_result_there:
                    self.on_gpu(tensor)
        if pins:
            self.pinned(result)
        is_queued = any(isinstance(each, Tensor) and self.is_on_gpu(each) for each in (*on_gpu, *tree_leaves(result)))
        self.num_operations += is_queued
        if not operator.is_view:  # which reads and writes no memory
            self._order(operator, given, named, result, tensors=tensors, is_queued=is_queued)
        return result

    def _order(
        self, operator: Any, given: Any, named: Any, result: Any, *, tensors: list[Tensor], is_queued: bool
    ) -> None:
        """Queue the operator on the current stream, or have the host run it."""
        arguments = [*zip(operator._schema.arguments, given, strict=False)]
        arguments += [(each, named[each.name]) for each in operator._schema.arguments if each.name in named]
        written = [leaf for argument, value in arguments if _is_written(argument) for leaf in tree_leaves(value)]
        writes = self._blocks([*written, *tree_leaves(result)])
        reads = [block for block in self._blocks(tensors) if not any(block is other for other in writes)]
        if reads or writes:
            name = operator._schema.name
            self.timeline.work(name, reads=reads, writes=writes, stream=None if is_queued else HOST)
            if is_queued and self._waits:
                self.timeline.wait(HOST, self.timeline.clocks[self.timeline.current])
        self._waits = False

    def _blocks(self, values: Iterable[Any]) -> list[Block]:
        blocks = {id(block): block for each in values if isinstance(each, Tensor) and (block := self.block_of(each))}
        return list(blocks.values())

    def _copy(self, operator: Any, given: Any, named: dict[str, Any], *, target: Any) -> Tensor:
        """Copy as between devices, and report a copy for which the host waits."""
        is_in_place = operator._schema.name == "aten::copy_"
        source = given[1] if is_in_place else given[0]
        was_there = self.is_on_gpu(source)
        if is_in_place:
            goes_there, non_blocking = self.is_on_gpu(given[0]), bool(given[2] if len(given) > 2 else False)
            non_blocking = bool(named.get("non_blocking", non_blocking))
        else:
            goes_there = _is_cuda(target) or (was_there and not self.goes_to_host)
            non_blocking = bool(named.get("non_blocking", False))
        if goes_there and not was_there:
            if not self.is_pinned(source):
                self.report(operator._schema.name, _PAGEABLE)
            elif not non_blocking:
                self.report(operator._schema.name, _BLOCKING)
        elif was_there and not goes_there and not (non_blocking and (not is_in_place or self.is_pinned(given[0]))):
            self.report(operator._schema.name, _TO_HOST)
        result = operator(*given, **named)
        if not is_in_place and goes_there:
            self.on_gpu(result)
        elif not is_in_place and was_there and non_blocking:
            self.pinned(result)  # as torch allocates it
        return result

    def _check(
        self, operator: Any, name: str, given: Any, named: Any, *, tensors: list[Tensor], on_gpu: list[Tensor]
    ) -> None:
        """Raise RuntimeError for tensors of two devices; report an operator whose result the host waits for."""
        if not on_gpu:
            return
        others = [tensor for tensor in tensors if _has_storage(tensor) and not self.is_on_gpu(tensor)]
        indices = [each for each in given[1] if each is not None] if name in _INDEXING else []
        for tensor in others:
            if any(tensor is index for index in indices):
                self.report(name, _PAGEABLE)  # torch sends an index of the CPU to the GPU
            elif tensor.ndim > 0 or name in _NO_SCALARS:
                raise RuntimeError(
                    f"{name}: expected all tensors to be on the same device, but found cuda:0 and cpu: "
                    f"{[(tuple(each.shape), 'cuda' if self.is_on_gpu(each) else 'cpu') for each in tensors]}"
                )
        is_mask = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
        if is_mask and not (name.startswith("aten::index_put") and given[2].numel() == 1 and given[2] in others):
            self.report(name, _READ)
        if name in _WAITING or (name == "aten::repeat_interleave" and named.get("output_size") is None):
            self.report(name, _READ)


_WAITING = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique", "_unique2", "unique_dim",
        "unique_consecutive", "unique_dim_consecutive", "bincount", "_linalg_check_errors",
    )
)  # fmt: skip
"""Operators whose result, or its shape, has to reach the host."""

_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")

_NO_SCALARS = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::embedding", "aten::gather", "aten::cat"})


def _attention_of_samples(
    query: Tensor, key: Tensor, value: Tensor, edges: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Stand in for flash attention, which torch has for GPUs alone: [tokens, heads, width], sample by sample."""
    *_, scale, window = others[:6]  # after its edges and lengths, and whether it is causal
    output = torch.empty_like(query)
    for start, stop in itertools.pairwise(int(edge) for edge in edges):
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)[None]
        left, right = (math.inf if side < 0 else side for side in window)
        rows = (part[start:stop].transpose(0, 1)[None] for part in (query, key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(
            *rows, attn_mask=(distance <= left) & (-distance <= right), scale=scale, enable_gqa=True
        )
        output[start:stop] = attended[0].transpose(0, 1)
    return output, query.new_zeros((query.shape[1], query.shape[0]), dtype=torch.float32), torch.zeros(2)


def _zeros_of_gradients(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> Any:
    return tuple(map(torch.zeros_like, (query, key, value)))


def _histc(values: Tensor, *given: Any, **named: Any) -> Tensor:
    """Count integers, which the CPU does for floating-point numbers alone."""
    counts: Tensor = torch.ops.aten.histc(values.float(), *given, **named)
    return counts.to(values.dtype)


def _mm(one: Tensor, other: Tensor, out_dtype: torch.dtype | None = None, **named: Any) -> Tensor:
    """Return the product, of the given dtype, which the CPU's alone cannot have."""
    product: Tensor = torch.ops.aten.mm(one, other, **named)
    return product if out_dtype is None else product.to(out_dtype)


_STAND_INS: dict[str, Callable[..., Any]] = {
    "aten::histc": _histc,
    "aten::mm": _mm,
    "torch_attn::_varlen_attn": _attention_of_samples,
    "torch_attn::_varlen_attn_backward": _zeros_of_gradients,
}


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor) and _real_type(tensor) == "cpu"


def _real_type(tensor: Tensor) -> str:
    device: torch.device = _DEVICE.__get__(tensor)
    return device.type


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device | str)


def _on_cpu(value: Any) -> Any:
    return CPU if _is_device(value) and _is_cuda(value) else value


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _calls_cpp() -> bool:
    """Return whether C++ makes the tensor, which one of these files has called."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _WRAPPERS:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename in _CALLING_CPP


def _caller() -> str:
    """Return the innermost function of the package on the stack, else the innermost of any other library."""
    frame: FrameType | None = sys._getframe(1)
    innermost = ""
    while frame is not None:
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        if name.startswith(PACKAGE):
            return f"{name.removeprefix(PACKAGE)[1:]} {function}"
        if not innermost and "/torch/" not in name and name != __file__ and "contextlib" not in name:
            innermost = f"{'/'.join(Path(name).parts[-3:])} {function}"
        frame = frame.f_back
    return innermost


_DEVICE: Any = torch.Tensor.device

_CALLING_CPP = (torch.autograd.graph.__file__, torch.nn.parallel.distributed.__file__)
"""Files that make no tensors themselves: C++ that they call does, for gradients and their buckets."""

_WRAPPERS = (torch._compile.__file__, torch._dynamo.eval_frame.__file__)
"""Of `__torch_dispatch__` itself."""


def _replacements(gpu: FakeGpu) -> Iterator[tuple[Any, str, Any]]:
    """Yield what of torch answers without an operator: properties of tensors, and functions that read values."""

    def device_of(tensor: Tensor) -> torch.device:
        device: torch.device = _DEVICE.__get__(tensor)
        return GPU if device.type == "cpu" and gpu.is_on_gpu(tensor) else device

    yield Tensor, "device", property(device_of)
    yield Tensor, "is_cuda", property(lambda tensor: device_of(tensor).type == "cuda")
    yield Tensor, "is_cpu", property(lambda tensor: device_of(tensor).type == "cpu")
    yield Tensor, "get_device", lambda tensor: 0 if device_of(tensor).type == "cuda" else -1
    to = Tensor.to

    def with_index(value: Any) -> Any:
        return GPU if _is_device(value) and _is_cuda(value) else value

    def to_device(tensor: Tensor, *given: Any, **named: Any) -> Any:
        target = named.get("device", given[0] if given else None)
        if gpu not in _get_current_dispatch_mode_stack():  # in a thread of a loader of weights
            moved = to(tensor, *map(_on_cpu, given), **{name: _on_cpu(value) for name, value in named.items()})
            return gpu.on_gpu(moved.clone()) if _is_device(target) and _is_cuda(target) else moved
        if not _is_device(target) or not gpu.is_on_gpu(tensor) or is_traceable_wrapper_subclass(tensor):
            return to(tensor, *map(with_index, given), **{name: with_index(value) for name, value in named.items()})
        options = dict(zip(("device", "dtype", "non_blocking", "copy"), given, strict=False)) | named
        options["dtype"] = options.get("dtype") or tensor.dtype
        del options["device"]
        if torch.device(target).type == "cuda":
            return to(tensor, **options)
        options.pop("copy", None)
        gpu.goes_to_host = True
        try:
            return torch.ops.aten._to_copy(tensor, device=torch.device(target), **options)
        finally:
            gpu.goes_to_host = False

    yield Tensor, "to", to_device  # a device without an index asks a driver for the current one
    yield Tensor, "cpu", lambda tensor, *_: to_device(tensor, CPU)
    yield Tensor, "cuda", lambda tensor, *_, **named: to_device(tensor, GPU, **named)
    yield Tensor, "is_pinned", lambda tensor, *_: gpu.is_pinned(tensor)
    yield Tensor, "pin_memory", lambda tensor, *_: gpu.pinned(tensor.clone())

    def reading(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def read(tensor: Tensor, *given: Any, **named: Any) -> Any:
            if gpu.is_on_gpu(tensor):
                if name in ("numpy", "__array__"):
                    raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
                gpu.report(f"Tensor.{name}", _READ)
                gpu.timeline.wait(HOST, gpu.timeline.clocks[gpu.timeline.current])
                gpu._waits = False
            gpu.read_by_host(tensor)
            return original(tensor, *given, **named)

        return read

    for name in ("tolist", "numpy", "__array__"):
        yield Tensor, name, reading(name)

    def creating(function: Callable[..., Any]) -> Callable[..., Any]:
        def create(*given: Any, **named: Any) -> Any:
            target = named.get("device")
            if target is None or torch.device(target).type != "cuda":
                return function(*given, **named)
            if isinstance(given[0], Tensor):
                return given[0].to(target, dtype=named.get("dtype"))
            gpu.report(f"torch.{function.__name__}", _PAGEABLE)
            return gpu.on_gpu(function(*given, **{**named, "device": CPU}))

        return create

    for name in ("tensor", "as_tensor", "asarray"):
        yield torch, name, creating(getattr(torch, name))
    pad = torch.nn.utils.rnn.pad_sequence

    def pad_sequence(sequences: Any, *given: Any, **named: Any) -> Any:
        gpu.makes_on_gpu = any(map(gpu.is_on_gpu, sequences))
        try:
            return pad(sequences, *given, **named)
        finally:
            gpu.makes_on_gpu = False

    yield torch.nn.utils.rnn, "pad_sequence", pad_sequence
    group = torch._C._group_tensors_by_device_and_dtype

    def group_tensors(*given: Any, **named: Any) -> dict[Any, Any]:
        groups = group(*given, **named).items()
        return {(lists[0][0][0].device, dtype): lists for (_, dtype), lists in groups}

    yield torch._C, "_group_tensors_by_device_and_dtype", group_tensors
    generator = torch.Generator
    yield torch, "Generator", lambda device=CPU: generator(_on_cpu(torch.device(device)))
    make_wrapper = Tensor._make_wrapper_subclass

    def make_wrapper_subclass(*given: Any, **named: Any) -> Any:
        if torch.device(named.get("device") or CPU).type == "cuda":
            named["device"] = CPU
        return make_wrapper(*given, **named)

    yield Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper_subclass)
