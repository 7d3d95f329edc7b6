"""Tensors put together from the ranks that hold their parts."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from finetune.checkpoint.access import place
from finetune.checkpoint.placement import Held
from finetune.checkpoint.record import BUFFER, DTYPES, TensorRecord
from finetune.checkpoint.state import StateAccess
from finetune.runtime import ranks

_CHUNK_ELEMENTS = 1 << 24
"""Elements sent at once (64 MiB), which is what a rank that does not keep the tensor needs of memory."""


def agree_on_records(access: StateAccess) -> list[TensorRecord]:
    """Return all tensors of the state, in one order on every rank; one may know what another has not. Collective."""
    own = access.records()
    if all(access.is_whole(record) for record in own):
        return own
    merged: dict[str, dict[str, TensorRecord]] = {}
    for records in ranks.gather_objects(own):
        for record in records:
            merged.setdefault(record.name, {}).setdefault(record.key, record)
    names = dict.fromkeys(record.name for record in own)
    return [merged[name][key] for name in names for key in merged[name]]


def gather_tensor(access: StateAccess, record: TensorRecord, *, owner: int) -> Tensor | None:
    """Return the whole tensor, flat and on the CPU, on the owner; None elsewhere. Collective."""
    is_owner = ranks.rank() == owner
    if access.is_whole(record):
        return access.read(record).cpu() if is_owner else None
    own = access.read(record) if access.contributes else torch.empty(0)
    start, _ = access.span(record)
    return _assemble(own, record, start=start, owner=owner, device=access.device)


def gather_weights(accelerator: Accelerator, model: nn.Module, *, trained_only: bool) -> dict[str, Tensor]:
    """Return the weights of the prepared model by canonical name, on the CPU of rank 0; elsewhere nothing. Collective.

    They have the type they are trained in: fp32 masters where such exist. Persistent buffers come with them unless only
    what is trained is asked for. Tied weights come once.
    """
    placement = place(model)
    is_main = ranks.is_main()
    weights: dict[str, Tensor] = {}
    for name, held in placement.held.items():
        if trained_only and not held.is_trained:
            continue
        value = _weight(held, contributes=placement.contributes, device=accelerator.device)
        if value is not None:
            weights[name] = value
    if is_main and not trained_only:
        weights.update({name: buffer.detach().cpu().clone() for name, buffer in placement.buffers.items()})
    return weights


def _weight(held: Held, *, contributes: bool, device: torch.device) -> Tensor | None:
    if held.is_whole:
        return held.owner.detach().cpu().clone() if ranks.is_main() else None
    own = held.part(held.owner) if contributes else torch.empty(0)
    code = {dtype: code for code, dtype in DTYPES.items()}[held.owner.dtype]
    record = TensorRecord(name="", key=BUFFER, shape=held.shape, dtype=code)
    value = _assemble(own, record, start=held.start, owner=0, device=device)
    return value.view(held.shape) if value is not None else None


def _assemble(own: Tensor, record: TensorRecord, *, start: int, owner: int, device: torch.device) -> Tensor | None:
    """Add up, as bits, what each rank has: elsewhere it has zeros, so that every number arrives as it is (-0.0 too)."""
    kept = torch.empty(record.num_elements, dtype=DTYPES[record.dtype]) if ranks.rank() == owner else None
    for first in range(0, record.num_elements, _CHUNK_ELEMENTS):
        last = min(first + _CHUNK_ELEMENTS, record.num_elements)
        chunk = torch.zeros(last - first, dtype=torch.float32, device=device)
        low, high = max(first, start), min(last, start + own.numel())
        if low < high:
            chunk[low - first : high - first] = own[low - start : high - start]
        if ranks.is_distributed():
            dist.reduce(chunk.view(torch.int32), dst=owner)
        if kept is not None:
            kept[first:last] = chunk.to("cpu", kept.dtype)
    return kept
