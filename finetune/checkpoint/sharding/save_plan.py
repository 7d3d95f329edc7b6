"""The assignment of tensors to files and ranks: a pure function of the records, so all ranks have the same plan."""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from finetune.checkpoint.format.tensor_file import BUFFER, DTYPES, TensorRecord

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
            for pack in _split_into_files([record for record in share if record.part == part], max_file_bytes):
                planned.append(PlannedFile(f"{part}/{next(numbers):05d}.safetensors", writer, pack))
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


def _split_into_files(records: Sequence[TensorRecord], max_file_bytes: int) -> list[tuple[TensorRecord, ...]]:
    """Return the records split into files; wide dtypes first, so that every tensor is aligned to its element size."""
    packs: list[list[TensorRecord]] = []
    size = 0
    for record in sorted(records, key=lambda record: (-DTYPES[record.dtype].itemsize, record.stored_name)):
        if not packs or size + record.size_bytes > max_file_bytes:
            packs.append([])
            size = 0
        packs[-1].append(record)
        size += record.size_bytes
    return [tuple(pack) for pack in packs]
