"""The contents of a checkpoint: copied to host memory first, or gathered while it is written and training waits."""

import mmap
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from finetune.checkpoint.format.tensor_file import DTYPES, TensorRecord
from finetune.checkpoint.sharding.gather import Gathered, Gatherer, agree_on_records, agree_on_scalars
from finetune.checkpoint.sharding.save_plan import PlannedFile, plan_files
from finetune.checkpoint.sharding.state_access import StateAccess
from finetune.errors import CheckpointError
from finetune.runtime import distributed
from finetune.runtime.distributed import run_on_all_ranks
from finetune.runtime.resources import format_size

PAGE_BYTES = mmap.PAGESIZE

Register = Callable[[int, int], None]
"""Page-locks this number of bytes at an address; raises CheckpointError if the driver refuses."""


def pinned_size(size_bytes: int) -> int:
    """Return the memory of a buffer of this size: whole pages, of which only its own are locked.

    >>> pinned_size(1) // PAGE_BYTES, pinned_size(8 * PAGE_BYTES) // PAGE_BYTES
    (2, 9)
    """
    return _whole_pages(size_bytes) + PAGE_BYTES


class PinnedMemory:
    """A flat buffer of bytes, zeroed and page-locked; deleting this object unlocks it."""

    def __init__(
        self, size_bytes: int, *, register: Register | None = None, unregister: Callable[[int], None] | None = None
    ) -> None:
        """`register` and `unregister` are the CUDA driver's by default."""
        locked_bytes = _whole_pages(size_bytes)
        memory = torch.empty(pinned_size(size_bytes), dtype=torch.uint8)
        start = -memory.data_ptr() % PAGE_BYTES
        # Zeroed first, since registering would commit the pages in a single thread.
        self.bytes: Tensor = memory[start : start + locked_bytes].zero_()[:size_bytes]
        address = self.bytes.data_ptr()
        (register or _register)(address, locked_bytes)
        unlock = unregister or _unregister
        # The call holds a reference to the memory until it is unlocked.
        weakref.finalize(self, lambda memory: unlock(address), memory)


def _whole_pages(size_bytes: int) -> int:
    return max(1, -(-size_bytes // PAGE_BYTES)) * PAGE_BYTES


def _register(address: int, size_bytes: int) -> None:
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(driver.cudaHostRegister(address, size_bytes, 0))
    if code:
        raise CheckpointError(
            f"checkpoint.asynchronous: the driver cannot page-lock {format_size(size_bytes)} of memory for the copies"
            f" (CUDA error {code}). Write `checkpoint.asynchronous: false`, so that training waits while checkpoints "
            "are written, or raise the limit of locked memory (`ulimit -l`)."
        )


def _unregister(address: int) -> None:
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    driver.cudaHostUnregister(address)


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint."""

    step: int
    planned: Sequence[PlannedFile]
    tensors: Callable[[], Iterator[Gathered]]  # that this rank writes, in file order; called for every attempt
    scalars: Mapping[str, Any]  # `optimizer` and `loss_scale`
    progress: Mapping[str, Any]

    @property
    def size_bytes(self) -> int:
        """Return the size of all ranks' tensors."""
        return sum(record.size_bytes for file in self.planned for record in file.records)


class StreamingSource:
    """Contents that are gathered while they are written: needs memory for one tensor at a time, but training waits."""

    def __init__(self, access: StateAccess) -> None:
        self._access = access
        self._gatherer = Gatherer(access)

    def capture(self, step: int, *, progress: Mapping[str, Any]) -> Contents:
        """Return the state at the time of iterating over its tensors, which is collective. Collective."""
        planned = _plan(self._access)
        tensors = partial(self._gatherer.gather, planned, buffer_for=_new_buffer)
        return Contents(step, planned, tensors, _scalars(self._access), deepcopy(dict(progress)))

    def rehearse(self, planned: Sequence[PlannedFile], *, existing: frozenset[TensorRecord]) -> None:
        """Gather the planned tensors that already exist. Collective."""
        for _ in self._gatherer.gather(_only_existing(planned, existing), buffer_for=_new_buffer):
            pass


class SnapshotSource:
    """Contents that are copied to host memory, into buffers that each rank allocates once and reuses."""

    def __init__(self, access: StateAccess) -> None:
        self._access = access
        self._gatherer = Gatherer(access)
        self._planned: Sequence[PlannedFile] = ()
        self._buffers: dict[str, Tensor] = {}
        self._pinned: list[PinnedMemory] = []

    def capture(self, step: int, *, progress: Mapping[str, Any]) -> Contents:
        """Return a copy of the state, valid until the next one is captured. Collective.

        Raises CheckpointError on all ranks if one is out of memory.
        """
        planned = _plan(self._access)
        # No rank sends before every receiver has allocated its buffers.
        run_on_all_ranks(partial(self._allocate, planned))
        mine = list(self._gatherer.gather(planned, buffer_for=self._buffer))
        return Contents(step, planned, lambda: iter(mine), _scalars(self._access), deepcopy(dict(progress)))

    def rehearse(self, planned: Sequence[PlannedFile], *, existing: frozenset[TensorRecord]) -> None:
        """Allocate the buffers of all planned tensors, and copy those that already exist. Collective."""
        run_on_all_ranks(partial(self._allocate, planned))
        for _ in self._gatherer.gather(_only_existing(planned, existing), buffer_for=self._buffer):
            pass

    def _allocate(self, planned: Sequence[PlannedFile]) -> None:
        """Allocate the buffers of this rank's share, unless the plan is the same as for the last save."""
        if planned == self._planned:
            return
        self._planned, self._buffers, self._pinned = (), {}, []  # freed before new memory is allocated
        pins = self._access.device.type == "cuda"  # a GPU copies several times faster to pinned memory
        for file in planned:
            if file.writer == distributed.rank():
                if pins:
                    self._pinned.append(PinnedMemory(_size(file)))
                    memory = self._pinned[-1].bytes
                else:
                    memory = torch.empty(_size(file), dtype=torch.uint8).zero_()  # commits its pages
                self._buffers.update(_cut(memory, file))
        self._planned = planned

    def _buffer(self, file: PlannedFile, record: TensorRecord) -> Tensor:
        return self._buffers[record.stored_name]


def _plan(access: StateAccess) -> list[PlannedFile]:
    """Return the files of a checkpoint of the current state. Collective."""
    access.begin_reading()
    return plan_files(agree_on_records(access), world=distributed.world())


def _only_existing(planned: Sequence[PlannedFile], existing: frozenset[TensorRecord]) -> list[PlannedFile]:
    return [replace(file, records=tuple(record for record in file.records if record in existing)) for file in planned]


def _scalars(access: StateAccess) -> dict[str, Any]:
    """Return a copy of the numbers in the state. Collective."""
    return {"optimizer": agree_on_scalars(access), "loss_scale": access.loss_scale.read()}


def host_memory_bytes(planned: Sequence[PlannedFile]) -> int:
    """Return the host memory of this rank's copies."""
    return sum(pinned_size(_size(file)) for file in planned if file.writer == distributed.rank())


def _size(file: PlannedFile) -> int:
    return sum(record.size_bytes for record in file.records)


def _cut(memory: Tensor, file: PlannedFile) -> Iterator[tuple[str, Tensor]]:
    """Yield a buffer for each tensor of the file, all cut from this memory.

    Wide dtypes come first in a file, so every tensor is aligned to its element size.
    """
    start = 0
    for record in file.records:
        yield record.stored_name, memory[start : start + record.size_bytes].view(DTYPES[record.dtype])
        start += record.size_bytes


def _new_buffer(file: PlannedFile, record: TensorRecord) -> Tensor:
    return torch.empty(record.num_elements, dtype=DTYPES[record.dtype])
