"""What a checkpoint consists of: copied to host memory first, or gathered while it is written and training waits."""

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
from finetune.runtime import distributed
from finetune.runtime.run_on_ranks import run_on_all_ranks


@dataclass(frozen=True)
class Contents:
    """Everything that a checkpoint is of."""

    step: int
    planned: Sequence[PlannedFile]
    tensors: Callable[[], Iterator[Gathered]]  # this rank's, in the order of its files; anew for each try
    scalars: Mapping[str, Any]  # `optimizer` and `loss_scale`
    progress: Mapping[str, Any]

    @property
    def size_bytes(self) -> int:
        """Return the size of all ranks' tensors."""
        return sum(record.size_bytes for file in self.planned for record in file.records)


class StreamingSource:
    """Contents that are gathered while they are written: needs room for a tensor at a time, and training waits."""

    def __init__(self, access: StateAccess) -> None:
        self._access = access
        self._gatherer = Gatherer(access)

    def take(self, step: int, *, progress: Mapping[str, Any]) -> Contents:
        """Return the state as it is when its tensors are asked for, which is collective. Collective."""
        planned = _plan(self._access)
        tensors = partial(self._gatherer.gather, planned, buffer_for=_new_buffer)
        return Contents(step, planned, tensors, _scalars(self._access), deepcopy(dict(progress)))

    def rehearse(self, planned: Sequence[PlannedFile], *, here: frozenset[TensorRecord]) -> None:
        """Gather what is here already of the planned tensors. Collective."""
        for _ in self._gatherer.gather(_only_existing(planned, here), buffer_for=_new_buffer):
            pass


class SnapshotSource:
    """Contents that are copied to the memory of the hosts: each rank has room for its share, used again and again."""

    def __init__(self, access: StateAccess) -> None:
        self._access = access
        self._gatherer = Gatherer(access)
        self._planned: Sequence[PlannedFile] = ()
        self._shelves: dict[str, Tensor] = {}

    def take(self, step: int, *, progress: Mapping[str, Any]) -> Contents:
        """Return a copy of the state, which lasts until the next is taken. Collective.

        Raises CheckpointError on all ranks where one has no room for its share.
        """
        planned = _plan(self._access)
        # Nobody begins to send before every owner has a place for what is sent to it.
        run_on_all_ranks(partial(self._make_room, planned))
        mine = list(self._gatherer.gather(planned, buffer_for=self._shelf))
        return Contents(step, planned, lambda: iter(mine), _scalars(self._access), deepcopy(dict(progress)))

    def rehearse(self, planned: Sequence[PlannedFile], *, here: frozenset[TensorRecord]) -> None:
        """Have room for all that is planned, and copy what is here already. Collective."""
        run_on_all_ranks(partial(self._make_room, planned))
        for _ in self._gatherer.gather(_only_existing(planned, here), buffer_for=self._shelf):
            pass

    def _make_room(self, planned: Sequence[PlannedFile]) -> None:
        """Have a place for this rank's share; kept as long as the plan is the same, as most often it is."""
        if planned == self._planned:
            return
        self._planned, self._shelves = (), {}  # given back before new memory is taken
        pins = self._access.device.type == "cuda"  # a GPU copies into pinned memory several times as fast
        for file in planned:
            if file.owner == distributed.rank():
                self._shelves.update(_host_buffers(file, pins=pins))
        self._planned = planned

    def _shelf(self, file: PlannedFile, record: TensorRecord) -> Tensor:
        return self._shelves[record.stored_name]


def _plan(access: StateAccess) -> list[PlannedFile]:
    """Return the files of a checkpoint of the state as it is now. Collective."""
    access.begin_reading()
    return plan_files(agree_on_records(access), world=distributed.world())


def _only_existing(planned: Sequence[PlannedFile], here: frozenset[TensorRecord]) -> list[PlannedFile]:
    return [replace(file, records=tuple(record for record in file.records if record in here)) for file in planned]


def _scalars(access: StateAccess) -> dict[str, Any]:
    """Return a copy of the plain numbers of the state. Collective."""
    return {"optimizer": agree_on_scalars(access), "loss_scale": access.loss_scale.read()}


def _host_buffers(file: PlannedFile, *, pins: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield a place for each tensor of the file, in one piece of memory that has been touched and so is really there.

    Wide types come first in a file, so every tensor begins at a multiple of its width.
    """
    size = sum(record.size_bytes for record in file.records)
    memory = torch.empty(size, dtype=torch.uint8, pin_memory=pins).zero_()
    start = 0
    for record in file.records:
        yield record.stored_name, memory[start : start + record.size_bytes].view(DTYPES[record.dtype])
        start += record.size_bytes


def _new_buffer(file: PlannedFile, record: TensorRecord) -> Tensor:
    return torch.empty(record.num_elements, dtype=DTYPES[record.dtype])
