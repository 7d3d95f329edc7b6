"""Tensors put together from the ranks that hold their parts."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune.checkpoint.access import place
from finetune.checkpoint.exchange import Parcel, exchange
from finetune.checkpoint.record import TensorRecord
from finetune.checkpoint.sharing import PlannedFile, gathering_rounds
from finetune.checkpoint.state import Scalars, StateAccess
from finetune.runtime import ranks

Kind = tuple[str, int]
"""A parameter's name and a number of elements: its value's, or those of a state with fewer numbers in each row."""

Spans = Mapping[Kind, Sequence[tuple[int, int]]]
"""By kind of tensor, what each rank sends of it: elements [start, stop)."""

Shelf = Callable[[PlannedFile, TensorRecord], Tensor]
"""Returns where a tensor of this rank's is to be put together, flat, in host memory."""

K = TypeVar("K", str, Kind)

Gathered = tuple[PlannedFile, TensorRecord, Tensor]


def agree_on_records(access: StateAccess) -> list[TensorRecord]:
    """Return all tensors of the state, in one order on every rank; one may know what another has not. Collective."""
    own = access.records()
    if all(access.is_whole(record) for record in own) or not _differs(own):
        return own
    merged: dict[str, dict[str, TensorRecord]] = {}
    for records in ranks.gather_objects(own):
        for record in records:
            merged.setdefault(record.name, {}).setdefault(record.key, record)
    names = dict.fromkeys(record.name for record in own)
    return [merged[name][key] for name in names for key in merged[name]]


def agree_on_scalars(access: StateAccess) -> Scalars:
    """Return all numbers of the optimizer on every rank. Collective."""
    own = access.read_scalars()
    if not _differs(own):
        return own
    merged: Scalars = {}
    for scalars in ranks.gather_objects(own):
        merged.update(scalars)
    return merged


class Gatherer:
    """Brings tensors of the state to their owners; who holds what is asked once, as it never changes."""

    def __init__(self, access: StateAccess) -> None:
        self._access = access
        self._spans: dict[Kind, list[tuple[int, int]]] = {}

    def gather(self, planned: Sequence[PlannedFile], *, shelf: Shelf) -> Iterator[Gathered]:
        """Yield this rank's tensors as they become whole; every rank has to take all that there are. Collective."""
        self._ask([record for file in planned for record in file.records])
        for batch in gathering_rounds(planned):
            mine = {record: shelf(file, record) for file, record in batch if file.owner == ranks.rank()}
            exchange(
                [self._parcel(file, record, mine.get(record)) for file, record in batch], device=self._access.device
            )  # no name for the parcels: they would keep this round's tensors while the next one's are gathered
            for file, record in batch:
                if record in mine:
                    yield file, record, mine.pop(record)

    def _ask(self, records: Sequence[TensorRecord]) -> None:
        """Learn what each rank holds of the kinds of tensors that are new. Collective."""
        new = {_kind(record): record for record in records if not self._access.is_whole(record)}
        if new.keys() <= self._spans.keys():
            return
        own = [self._access.span(record) if self._access.contributes else (0, 0) for record in new.values()]
        self._spans.update(_by_kind(list(new), ranks.gather_objects(own)))

    def _parcel(self, file: PlannedFile, record: TensorRecord, into: Tensor | None) -> Parcel:
        is_whole = self._access.is_whole(record)
        spans = _only(file.owner, record.num_elements) if is_whole else self._spans[_kind(record)]
        start, stop = spans[ranks.rank()]
        return Parcel(file.owner, spans, self._access.read(record) if start < stop else torch.empty(0), into)


def gather_weights(accelerator: Accelerator, model: nn.Module, *, trained_only: bool) -> dict[str, Tensor]:
    """Return the weights of the prepared model by canonical name, on the CPU of rank 0; elsewhere nothing. Collective.

    They have the type they are trained in: fp32 masters where such exist. Persistent buffers come with them unless only
    what is trained is asked for. Tied weights come once.
    """
    placement = place(model)
    is_main = ranks.is_main()
    wanted = {name: held for name, held in placement.held.items() if held.is_trained or not trained_only}
    parted = [name for name, held in wanted.items() if not held.is_whole]
    own = [(wanted[name].start, wanted[name].stop) if placement.contributes else (0, 0) for name in parted]
    spans = _by_kind(parted, ranks.gather_objects(own))
    weights: dict[str, Tensor] = {}
    for name, held in wanted.items():
        into = torch.empty(held.shape, dtype=held.owner.dtype) if is_main else None
        flat = into.view(-1) if into is not None else None
        sent = spans[name] if name in spans else _only(0, held.stop)
        start, stop = sent[ranks.rank()]
        part = held.part(held.owner) if start < stop else torch.empty(0)
        exchange([Parcel(0, sent, part, flat)], device=accelerator.device)
        if into is not None:
            weights[name] = into
    if is_main and not trained_only:
        weights.update({name: buffer.detach().cpu().clone() for name, buffer in placement.buffers.items()})
    return weights


def _differs(value: object) -> bool:
    """Tell whether ranks have different values, which costs less than to send them. Collective."""
    digest = hashlib.sha256(repr(value).encode()).hexdigest()
    return len(set(ranks.gather_objects(digest))) > 1


def _kind(record: TensorRecord) -> Kind:
    return record.name, record.num_elements


def _by_kind(kinds: Sequence[K], gathered: Sequence[Sequence[tuple[int, int]]]) -> dict[K, list[tuple[int, int]]]:
    return {kind: [spans[index] for spans in gathered] for index, kind in enumerate(kinds)}


def _only(owner: int, count: int) -> list[tuple[int, int]]:
    return [(0, count) if rank == owner else (0, 0) for rank in range(ranks.world())]
