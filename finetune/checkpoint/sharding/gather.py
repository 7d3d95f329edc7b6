"""Which rank writes which tensors, and how it gathers them whole from the ranks with their shards, point to point.

The assignment to files and ranks is a pure function of the records, so all ranks have the same plan.
"""

import hashlib
import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from finetune.checkpoint.format.tensor_file import BUFFER, DTYPES, TensorRecord
from finetune.checkpoint.sharding.access import Scalars, StateAccess, state_layout
from finetune.checkpoint.sharding.state_layout import ShardRange
from finetune.runtime import distributed

MAX_FILE_BYTES = 4 << 30

ROUND_BYTES = 32 << 20
"""Small tensors are gathered together up to this size, since every message has a latency."""


@dataclass(frozen=True)
class PlannedFile:
    """A tensor file, the rank that writes it, and its tensors in order."""

    name: str  # relative to the checkpoint, with forward slashes
    writer: int
    records: tuple[TensorRecord, ...]

    @property
    def size_bytes(self) -> int:
        """Return the size of its tensors."""
        return sum(record.size_bytes for record in self.records)


def plan_files(
    records: Sequence[TensorRecord], *, world: int, max_file_bytes: int = MAX_FILE_BYTES
) -> list[PlannedFile]:
    """Return the files of a checkpoint; the ranks' shares differ by at most one tensor.

    Files are numbered; the index has the file of each tensor.
    """
    shares = assign_tensors(records, world=world)
    planned: list[PlannedFile] = []
    for part in ("model", "optimizer"):
        numbers = count()
        for writer, share in enumerate(shares):
            packs: list[list[TensorRecord]] = []
            size = 0
            # Wide dtypes come first, so that every tensor is aligned to its element size.
            of_part = [record for record in share if record.part == part]
            for record in sorted(of_part, key=lambda record: (-DTYPES[record.dtype].itemsize, record.stored_name)):
                if not packs or size + record.size_bytes > max_file_bytes:
                    packs.append([])
                    size = 0
                packs[-1].append(record)
                size += record.size_bytes
            for pack in packs:
                planned.append(PlannedFile(f"{part}/{next(numbers):05d}.safetensors", writer, tuple(pack)))
    return planned


def assign_tensors(records: Sequence[TensorRecord], *, world: int) -> list[list[TensorRecord]]:
    """Return each rank's tensors: the largest first, each to the rank with the smallest share; buffers to rank 0."""
    shares: list[list[TensorRecord]] = [[] for _ in range(world)]
    shares[0].extend(record for record in records if record.key == BUFFER)
    loads = [(sum(record.size_bytes for record in share), writer) for writer, share in enumerate(shares)]
    heapq.heapify(loads)
    rest = [record for record in records if record.key != BUFFER]
    for record in sorted(rest, key=lambda record: (-record.size_bytes, record.stored_name)):
        load, writer = heapq.heappop(loads)
        shares[writer].append(record)
        heapq.heappush(loads, (load + record.size_bytes, writer))
    return shares


def gather_rounds(planned: Sequence[PlannedFile]) -> Iterator[list[tuple[PlannedFile, TensorRecord]]]:
    """Yield the tensors to gather at one time: for every writer its next few small ones, or one large one.

    Thus writers receive and write in parallel, and none needs memory for more than ROUND_BYTES or one large tensor.
    """
    queues: dict[int, deque[tuple[PlannedFile, TensorRecord]]] = {}
    for file in planned:
        queues.setdefault(file.writer, deque()).extend((file, record) for record in file.records)
    while any(queues.values()):
        taken = []
        for queue in queues.values():
            size = 0
            while queue and (size == 0 or size + queue[0][1].size_bytes <= ROUND_BYTES):
                size += max(queue[0][1].size_bytes, 1)
                taken.append(queue.popleft())
        yield taken


CHUNK_ELEMENTS = 1 << 24
"""Elements of a tensor in flight at one time (64 MiB): on a GPU, received elements need its memory."""


@dataclass(frozen=True)
class Transfer:
    """One flat tensor to be assembled on its receiver; all ranks know which elements each holds."""

    receiver: int
    ranges: Sequence[ShardRange]  # by rank: the elements that it sends; may be empty
    local: Tensor  # this rank's elements
    destination: Tensor | None  # on the receiver: the full tensor, in host memory


def run_transfers(transfers: Sequence[Transfer], *, device: torch.device) -> None:
    """Assemble every tensor on its receiver, bitwise; `device` is one that ranks can send from. Collective.

    Every rank passes the same transfers in the same order and posts all its receives before it waits, so there is no
    deadlock.
    """
    longest = max((sent.stop * sent.width for transfer in transfers for sent in transfer.ranges), default=0)
    for first in range(0, longest, CHUNK_ELEMENTS):
        operations: list[dist.P2POp] = []
        received: list[tuple[Tensor, Tensor]] = []  # destination in host memory, and the buffer
        for transfer in transfers:
            for sender, elements, local in _chunk(transfer, first=first, last=first + CHUNK_ELEMENTS):
                if elements is None:
                    values = _bytes(local.contiguous()).to(device)
                    operations.append(dist.P2POp(dist.isend, values, transfer.receiver))
                elif sender == transfer.receiver:
                    elements.copy_(local.view(elements.shape))
                else:
                    target = elements
                    if device.type != "cpu" or not elements.is_contiguous():
                        target = torch.empty(elements.shape, dtype=elements.dtype, device=device)
                        received.append((elements, target))
                    operations.append(dist.P2POp(dist.irecv, _bytes(target), sender))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for destination, buffer in received:
            destination.copy_(buffer)  # waits for the device


def _chunk(transfer: Transfer, *, first: int, last: int) -> Iterator[tuple[int, Tensor | None, Tensor]]:
    """Yield the parts of a transfer within [first, last) that concern this rank.

    Each is the sender, the receiver's view for it (None on a sender) and this rank's own elements.
    """
    me = distributed.rank()
    for sender in range(distributed.world()) if me == transfer.receiver else (me,):
        num_before = 0  # elements of the sender
        for sent in transfer.ranges[sender].rectangles():
            low, high = max(-(-first // sent.width), sent.start), min(-(-last // sent.width), sent.stop)
            size = sent.last - sent.first
            local = transfer.local[num_before + (low - sent.start) * size : num_before + (high - sent.start) * size]
            num_before += (sent.stop - sent.start) * size
            if low >= high:
                continue
            if me != transfer.receiver:
                yield sender, None, local
                continue
            assert transfer.destination is not None, "the receiver has a buffer"
            rows = transfer.destination[low * sent.width : high * sent.width]
            elements = rows if sent.width == 1 else rows.view(-1, sent.width)[:, sent.first : sent.last]
            yield sender, elements, local


def _bytes(values: Tensor) -> Tensor:
    """Return the values as bytes, which every backend sends unchanged."""
    return values.detach().view(torch.uint8)


TensorKey = tuple[str, int]
"""A parameter's name and a number of elements: of its value, or of a state with fewer elements per row."""

BufferFor = Callable[[PlannedFile, TensorRecord], Tensor]
"""Returns the flat buffer in host memory for a tensor that this rank writes."""

K = TypeVar("K", str, TensorKey)

Gathered = tuple[PlannedFile, TensorRecord, Tensor]


def agree_on_records(access: StateAccess) -> list[TensorRecord]:
    """Return the tensors of the state that any rank knows, in the same order on all ranks. Collective."""
    own = access.records()
    if all(access.is_replicated(record) for record in own) or not _differs(own):
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
    """Gathers tensors of the state on the ranks that write them; the ranges of all ranks are exchanged once."""

    def __init__(self, access: StateAccess) -> None:
        self._access = access
        self._ranges: dict[TensorKey, list[ShardRange]] = {}

    def gather(self, planned: Sequence[PlannedFile], *, buffer_for: BufferFor) -> Iterator[Gathered]:
        """Yield this rank's tensors as they are gathered; all ranks must exhaust the iterator. Collective."""
        records = [record for file in planned for record in file.records]
        new = {_key(record): record for record in records if not self._access.is_replicated(record)}
        if not new.keys() <= self._ranges.keys():
            own = [
                _NOTHING if self._access.is_copy(record) else self._access.local_range(record)
                for record in new.values()
            ]
            self._ranges.update(_by_key(list(new), distributed.gather_objects(own)))
        for batch in gather_rounds(planned):
            mine = {record: buffer_for(file, record) for file, record in batch if file.writer == distributed.rank()}
            run_transfers(
                [self._transfer(file, record, mine.get(record)) for file, record in batch], device=self._access.device
            )  # not bound to a name, which would keep this round's tensors alive during the next
            for file, record in batch:
                if record in mine:
                    yield file, record, mine.pop(record)

    def _transfer(self, file: PlannedFile, record: TensorRecord, destination: Tensor | None) -> Transfer:
        is_replicated = self._access.is_replicated(record)
        ranges = _all_from(file.writer, record.num_elements) if is_replicated else self._ranges[_key(record)]
        own = ranges[distributed.rank()]
        local = self._access.read(record) if own.start < own.stop else torch.empty(0)
        return Transfer(file.writer, ranges, local, destination)


def gather_weights(accelerator: Accelerator, model: nn.Module, *, trained_only: bool) -> dict[str, Tensor]:
    """Return the weights of the prepared model by canonical name on the CPU of rank 0; elsewhere nothing. Collective.

    Their dtype is that of training: that of the fp32 master weights if they exist. Persistent buffers are
    included unless `trained_only`; tied weights appear once.
    """
    layout = state_layout(model)
    is_main = distributed.is_main()
    selected = {name: shard for name, shard in layout.shards.items() if shard.is_trained or not trained_only}
    sharded = [name for name, shard in selected.items() if not shard.is_replicated]
    own = [_NOTHING if selected[name].is_copy else selected[name].range for name in sharded]
    ranges = _by_key(sharded, distributed.gather_objects(own))
    weights: dict[str, Tensor] = {}
    for name, shard in selected.items():
        full = torch.empty(shard.shape, dtype=shard.tensor.dtype) if is_main else None
        flat = full.view(-1) if full is not None else None
        sent = ranges[name] if name in ranges else _all_from(0, shard.stop)
        mine = sent[distributed.rank()]
        local = shard.local_view(shard.tensor) if mine.start < mine.stop else torch.empty(0)
        run_transfers([Transfer(0, sent, local, flat)], device=accelerator.device)
        if full is not None:
            weights[name] = full
    if is_main and not trained_only:
        weights.update({name: buffer.detach().cpu().clone() for name, buffer in layout.buffers.items()})
    return weights


def _differs(value: object) -> bool:
    """Return whether the ranks' values differ, by their digests, which are smaller. Collective."""
    digest = hashlib.sha256(repr(value).encode()).hexdigest()
    return len(set(distributed.gather_objects(digest))) > 1


def _key(record: TensorRecord) -> TensorKey:
    return record.name, record.num_elements


def _by_key(keys: Sequence[K], gathered: Sequence[Sequence[ShardRange]]) -> dict[K, list[ShardRange]]:
    return {key: [ranges[index] for ranges in gathered] for index, key in enumerate(keys)}


_NOTHING = ShardRange(0, 0)


def _all_from(sender: int, count: int) -> list[ShardRange]:
    return [ShardRange(0, count) if rank == sender else _NOTHING for rank in range(distributed.world())]
