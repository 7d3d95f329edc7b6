"""What is alive in a step, by what it is and by when; and the FLOPs of its operators."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from finetune.run.symbolic.live_bytes import LiveBytes, storages

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, GATHERED = (
    *("weights", "gradients", "optimizer"),
    *("activations", "communication buffers"),
)

_ATTENTION: Mapping[str, tuple[Callable[..., int], int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (sdpa_flop_count, 3),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flop_count, 4),
}
"""The CPU's operators of attention, of which torch has no formulas (2.13), each with the number of tensors it reads."""

_GROUPED_PRODUCT = "aten::_grouped_mm"
"""Of experts: as many products as groups of rows. torch has no formula for its FLOPs (2.13)."""

_ATTENTION_PRODUCTS = ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention")


class Tracer(LiveBytes):  # type: ignore[no-untyped-call]  # torch has no types for its base
    """Counts live bytes by kind, with the peak of each phase and what it consists of, and FLOPs by phase.

    Whatever is allocated counts as the present `kind`. A storage that is resized is a gathered parameter of FSDP.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.phase = WEIGHTS, "start"
        self.flop_phase: str | None = None  # where FLOPs do not count as the phase's
        self.held: Counter[str] = Counter()  # bytes that are alive, by kind
        self.peaks: dict[str, int] = {}  # by phase
        self.held_at_peak: dict[str, Mapping[str, int]] = {}
        self.transient_peaks: dict[str, int] = {}  # by phase, of all that is not weights, gradients or optimizer
        self.flops: Counter[tuple[str, bool]] = Counter()  # by phase, and whether they are attention's
        self._kinds: dict[int, str] = {}

    @contextmanager
    def counting_as(self, kind: str) -> Iterator[None]:
        """Count what is allocated meanwhile as this kind."""
        before, self.kind = self.kind, kind
        yield
        self.kind = before

    def reclassify(self, tensor: Tensor, kind: str) -> None:
        """Count the tensor's memory as this kind from here on."""
        for storage in storages(tensor):
            _, size = self._tracked.get(id(storage), (None, 0))
            self.held[self._kinds.get(id(storage), kind)] -= size
            self._kinds[id(storage)] = kind
            self.held[kind] += size

    def begin(self, phase: str) -> None:
        """Begin a phase; a phase that begins again goes on."""
        self.phase = phase
        self._note()

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if _name(operation) == _GROUPED_PRODUCT and given[0].dtype != torch.bfloat16:
            outputs = super().__torch_dispatch__(partial(_grouped_product, operation), types, given, named)
        else:
            outputs = super().__torch_dispatch__(operation, types, given, named)
        if outputs is not NotImplemented:
            self._count(operation, given, named or {}, outputs)
        return outputs

    def resized(self, storage: torch.UntypedStorage, *, by: int) -> None:
        """Count the change of a storage's size, which belongs to a parameter that is gathered."""
        with self.counting_as(GATHERED):
            super().resized(storage, by=by)

    def _count(self, operation: Any, given: Any, named: Any, outputs: Any) -> None:
        name = _name(operation)
        if name == _GROUPED_PRODUCT:
            one, other = given[:2]
            self.flops[self.flop_phase or self.phase, False] += 2 * one.shape[-2] * one.shape[-1] * other.shape[-1]
        if name in _ATTENTION:
            formula, number = _ATTENTION[name]
            self.flops[self.flop_phase or self.phase, True] += formula(*(each.shape for each in given[:number]))
            return
        counted = flop_registry.get(getattr(operation, "_overloadpacket", None))
        if counted is not None:
            is_attention = name.startswith(_ATTENTION_PRODUCTS)
            self.flops[self.flop_phase or self.phase, is_attention] += counted(*given, **named, out_val=outputs)

    def _track(self, storage: torch.UntypedStorage, size: int) -> None:
        self._kinds[id(storage)] = self.kind
        self.held[self.kind] += size
        super()._track(storage, size)
        self._note()

    def _forget(self, key: int) -> None:
        _, size = self._tracked.get(key, (None, 0))
        kind = self._kinds.pop(key, None)
        if kind is not None:
            self.held[kind] -= size
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
    """Return a grouped product of any dtype: without values, torch only has that of bfloat16 (2.13)."""
    halves = (torch.empty_like(each, dtype=torch.bfloat16) for each in (one, other))
    found: Tensor = operation(*halves, *others, **named)
    return torch.empty_like(found, dtype=one.dtype)
