"""Gathers whole tensors from the ranks that hold their parts, each sent point to point to the rank that needs it."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from finetune.checkpoint.format.tensor_file import TensorRecord
from finetune.checkpoint.sharding.access import state_layout
from finetune.checkpoint.sharding.save_plan import PlannedFile, gather_rounds
from finetune.checkpoint.sharding.state_access import Scalars, StateAccess
from finetune.runtime import distributed

CHUNK_ELEMENTS = 1 << 24
"""Elements of a tensor that are on their way at once (64 MiB): on a GPU, what arrives needs its memory."""


@dataclass(frozen=True)
class Transfer:
    """One tensor that is put together on its owner, flat; what each rank holds of it is known to all."""

    owner: int
    ranges: Sequence[tuple[int, int]]  # by rank: elements [start, stop); empty where a rank has nothing to send
    local: Tensor  # this rank's elements
    into: Tensor | None  # on the owner: the whole one, in host memory


def run_transfers(parcels: Sequence[Transfer], *, device: torch.device) -> None:
    """Bring every parcel to its owner, bit by bit as it is; `device` is where ranks can send from. Collective.

    Every rank passes the same parcels in the same order, and whatever is sent to it has been asked for before it waits,
    so nobody can wait in a circle.
    """
    longest = max((stop for parcel in parcels for _, stop in parcel.ranges), default=0)
    for first in range(0, longest, CHUNK_ELEMENTS):
        transfers = _Transfers(device)
        for parcel in parcels:
            _add(transfers, parcel, first=first, last=first + CHUNK_ELEMENTS)
        transfers.finish()


def _add(batch: "_Transfers", transfer: Transfer, *, first: int, last: int) -> None:
    me = distributed.rank()
    for sender in range(distributed.world()) if me == transfer.owner else (me,):
        start, stop = transfer.ranges[sender]
        low, high = max(first, start), min(last, stop)
        if low >= high:
            continue
        if me != transfer.owner:
            batch.send(transfer.local[low - start : high - start], to=transfer.owner)
            continue
        assert transfer.into is not None, "the owner has a place for it"
        if sender == me:
            transfer.into[low:high].copy_(transfer.local[low - start : high - start])
        else:
            batch.receive(transfer.into[low:high], sender=sender)


@dataclass
class _Transfers:
    """What this rank sends and receives at one time."""

    device: torch.device
    wanted: list[dist.P2POp] = field(default_factory=list)
    arriving: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # place in host memory, and where it arrives

    def send(self, values: Tensor, *, to: int) -> None:
        self.wanted.append(dist.P2POp(dist.isend, _bytes(values.contiguous()).to(self.device), to))

    def receive(self, place: Tensor, *, sender: int) -> None:
        target = _bytes(place)
        if self.device.type != "cpu":
            target = torch.empty_like(target, device=self.device)
            self.arriving.append((_bytes(place), target))
        self.wanted.append(dist.P2POp(dist.irecv, target, sender))

    def finish(self) -> None:
        if not self.wanted:
            return
        for work in dist.batch_isend_irecv(self.wanted):
            work.wait()
        for destination, arrived in self.arriving:
            destination.copy_(arrived)  # waits for the device


def _bytes(values: Tensor) -> Tensor:
    """Return the values as bytes, which every backend sends as they are."""
    return values.detach().view(torch.uint8)


TensorKey = tuple[str, int]
"""A parameter's name and a number of elements: its value's, or those of a state with fewer numbers in each row."""

Ranges = Mapping[TensorKey, Sequence[tuple[int, int]]]
"""By kind of tensor, what each rank sends of it: elements [start, stop)."""

BufferFor = Callable[[PlannedFile, TensorRecord], Tensor]
"""Returns where a tensor of this rank's is to be put together, flat, in host memory."""

K = TypeVar("K", str, TensorKey)

Gathered = tuple[PlannedFile, TensorRecord, Tensor]


def agree_on_records(access: StateAccess) -> list[TensorRecord]:
    """Return all tensors of the state, in one order on every rank; one may know what another has not. Collective."""
    own = access.records()
    if all(access.is_whole(record) for record in own) or not _differs(own):
        return own
    merged: dict[str, dict[str, TensorRecord]] = {}
    for records in distributed.gather_objects(own):
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
    for scalars in distributed.gather_objects(own):
        merged.update(scalars)
    return merged


class Gatherer:
    """Brings tensors of the state to their owners; who holds what is asked once, as it never changes."""

    def __init__(self, access: StateAccess) -> None:
        self._access = access
        self._spans: dict[TensorKey, list[tuple[int, int]]] = {}

    def gather(self, planned: Sequence[PlannedFile], *, buffer_for: BufferFor) -> Iterator[Gathered]:
        """Yield this rank's tensors as they become whole; every rank has to take all that there are. Collective."""
        self._ask([record for file in planned for record in file.records])
        for batch in gather_rounds(planned):
            mine = {record: buffer_for(file, record) for file, record in batch if file.owner == distributed.rank()}
            run_transfers(
                [self._parcel(file, record, mine.get(record)) for file, record in batch], device=self._access.device
            )  # no name for the parcels: they would keep this round's tensors while the next one's are gathered
            for file, record in batch:
                if record in mine:
                    yield file, record, mine.pop(record)

    def _ask(self, records: Sequence[TensorRecord]) -> None:
        """Learn what each rank holds of the kinds of tensors that are new. Collective."""
        new = {_key(record): record for record in records if not self._access.is_whole(record)}
        if new.keys() <= self._spans.keys():
            return
        own = [self._access.local_range(record) if self._access.contributes else (0, 0) for record in new.values()]
        self._spans.update(_by_key(list(new), distributed.gather_objects(own)))

    def _parcel(self, file: PlannedFile, record: TensorRecord, into: Tensor | None) -> Transfer:
        is_whole = self._access.is_whole(record)
        spans = _only_owner(file.owner, record.num_elements) if is_whole else self._spans[_key(record)]
        start, stop = spans[distributed.rank()]
        return Transfer(file.owner, spans, self._access.read(record) if start < stop else torch.empty(0), into)


def gather_weights(accelerator: Accelerator, model: nn.Module, *, trained_only: bool) -> dict[str, Tensor]:
    """Return the weights of the prepared model by canonical name, on the CPU of rank 0; elsewhere nothing. Collective.

    They have the type they are trained in: fp32 masters where such exist. Persistent buffers come with them unless only
    what is trained is asked for. Tied weights come once.
    """
    placement = state_layout(model)
    is_main = distributed.is_main()
    wanted = {name: held for name, held in placement.held.items() if held.is_trained or not trained_only}
    parted = [name for name, held in wanted.items() if not held.is_whole]
    own = [(wanted[name].start, wanted[name].stop) if placement.contributes else (0, 0) for name in parted]
    spans = _by_key(parted, distributed.gather_objects(own))
    weights: dict[str, Tensor] = {}
    for name, held in wanted.items():
        into = torch.empty(held.shape, dtype=held.owner.dtype) if is_main else None
        flat = into.view(-1) if into is not None else None
        sent = spans[name] if name in spans else _only_owner(0, held.stop)
        start, stop = sent[distributed.rank()]
        part = held.part(held.owner) if start < stop else torch.empty(0)
        run_transfers([Transfer(0, sent, part, flat)], device=accelerator.device)
        if into is not None:
            weights[name] = into
    if is_main and not trained_only:
        weights.update({name: buffer.detach().cpu().clone() for name, buffer in placement.buffers.items()})
    return weights


def _differs(value: object) -> bool:
    """Tell whether ranks have different values, which costs less than to send them. Collective."""
    digest = hashlib.sha256(repr(value).encode()).hexdigest()
    return len(set(distributed.gather_objects(digest))) > 1


def _key(record: TensorRecord) -> TensorKey:
    return record.name, record.num_elements


def _by_key(kinds: Sequence[K], gathered: Sequence[Sequence[tuple[int, int]]]) -> dict[K, list[tuple[int, int]]]:
    return {kind: [spans[index] for spans in gathered] for index, kind in enumerate(kinds)}


def _only_owner(owner: int, count: int) -> list[tuple[int, int]]:
    return [(0, count) if rank == owner else (0, 0) for rank in range(distributed.world())]
