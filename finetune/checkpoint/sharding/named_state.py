"""Implements `StateAccess` for a model and its torch optimizer, given the state layout of its strategy."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from finetune.checkpoint.format.tensor_file import BUFFER, PARAMETER, TensorRecord, dtype_code
from finetune.checkpoint.sharding.optimizer_state import create_empty_state, create_state_by_step, expected_state_keys
from finetune.checkpoint.sharding.state_access import LossScale, Scalars
from finetune.checkpoint.sharding.state_layout import ShardView, StateLayout
from finetune.errors import CheckpointError


class NamedState:
    """The state of a model and its torch optimizer, laid out as the placement says."""

    def __init__(
        self, placement: StateLayout, optimizer: torch.optim.Optimizer, *, device: torch.device, loss_scale: LossScale
    ) -> None:
        self._placement = placement
        self._optimizer = optimizer
        self._held = {name: held for name, held in placement.held.items() if held.is_trained}
        self._sharers: dict[int, list[str]] = {}  # parameters by the owner of their state
        for name, held in self._held.items():
            self._sharers.setdefault(id(held.owner), []).append(name)
        self.device = device
        self.loss_scale = loss_scale
        self.contributes = placement.contributes

    def records(self) -> list[TensorRecord]:
        """Return parameters, their optimizer state and buffers, in the model's order."""
        found: list[TensorRecord] = []
        for name, held in self._held.items():
            found.append(_record(name, PARAMETER, held.shape, held.owner))
            for key, tensor in sorted(self._tensors(held).items()):
                found.append(_record(name, key, _whole_shape(name, key, tensor=tensor, held=held), tensor))
        found.extend(_record(name, BUFFER, tuple(each.shape), each) for name, each in self._placement.buffers.items())
        return found

    def expected_state(self) -> tuple[str, ...]:
        """Return the words of what the optimizer will keep for each number of a parameter; none where it keeps less."""
        return expected_state_keys(self._optimizer)

    def is_whole(self, record: TensorRecord) -> bool:
        """Tell whether every rank holds all of the tensor."""
        return record.key == BUFFER or self._held[record.name].is_whole

    def local_range(self, record: TensorRecord) -> tuple[int, int]:
        """Return [start, stop)."""
        if self.is_whole(record):
            return 0, record.num_elements
        held = self._held[record.name]
        among = max(1, math.prod(held.shape))  # a state may have fewer numbers in each row than the parameter has
        return held.start * record.num_elements // among, held.stop * record.num_elements // among

    def read(self, record: TensorRecord) -> Tensor:
        """Return this rank's elements, flat; none where this rank has no such state."""
        start, stop = self.local_range(record)
        if start == stop:
            return torch.empty(0)
        if record.key == BUFFER:
            return self._placement.buffers[record.name].detach().reshape(-1)
        held = self._held[record.name]
        return held.part(self._tensor(record))

    @torch.no_grad()
    def write(self, record: TensorRecord, values: Tensor) -> None:
        """Write this rank's elements, given flat."""
        if not values.numel():
            return
        if record.key == BUFFER:
            buffer = self._placement.buffers[record.name]
            buffer.copy_(values.view(buffer.shape))
            return
        target = self._tensor(record)
        if self.is_whole(record):
            target.copy_(values.view(target.shape))  # also where the tensor's memory is not in order
        else:
            self._held[record.name].part(target).copy_(values)

    def adopt(self, record: TensorRecord, values: Tensor) -> bool:
        """Make the values the optimizer's state where they are laid out as what it keeps there."""
        if record.part != "optimizer" or not self.is_whole(record):
            return False
        target = self._tensor(record)
        is_alike = (values.dtype, values.device) == (target.dtype, target.device) and target.is_contiguous()
        if is_alike and type(target) is Tensor:
            self._state(self._held[record.name])[record.key] = values.view(target.shape)
            return True
        return False

    def read_scalars(self) -> Scalars:
        """Return the numbers among the optimizer's state."""
        return {
            name: numbers
            for name, held in self._held.items()
            if (numbers := {key: _number(value) for key, value in self._numbers(held).items()})
        }

    @torch.no_grad()
    def write_scalars(self, scalars: Scalars) -> None:
        """Write the optimizer's numbers, in the form in which the optimizer keeps them."""
        self._refuse_parted(scalars)
        for name, numbers in scalars.items():
            state = self._state(self._held[name])
            for key, number in numbers.items():
                if isinstance(state.get(key), Tensor):
                    state[key].fill_(number)
                elif state:
                    state[key] = type(state.get(key, number))(number)

    @torch.no_grad()
    def forget(self, names: Iterable[str]) -> None:
        """Take the state away; where others share it that were updated, set these parameters' part of it to zero."""
        forgotten = set(names)
        for sharers in self._sharers.values():
            held = self._held[sharers[0]]
            if forgotten.issuperset(sharers):
                self._optimizer.state.pop(held.owner, None)
                continue
            for name in forgotten.intersection(sharers):
                for tensor in self._tensors(held).values():
                    self._held[name].part(tensor).zero_()

    def begin_reading(self) -> None:
        """Put everything where it can be read."""
        self._placement.settle()

    def begin_writing(self) -> None:
        """Make optimizer state to be written into."""
        self._placement.settle()
        if self._placement.create_optimizer_state is not None:
            self._placement.create_optimizer_state()
        elif all(held.is_whole for held in self._held.values()):  # else there may be padding, which nobody writes
            create_empty_state(self._optimizer)
        else:
            create_state_by_step(self._optimizer)

    def finish_writing(self) -> None:
        """Hand what was written on to the copies that training uses. Collective."""
        self._placement.publish()

    def _state(self, held: ShardView) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(held.owner, {})
        return state

    def _tensor(self, record: TensorRecord) -> Tensor:
        held = self._held[record.name]
        tensor: Tensor = held.owner if record.key == PARAMETER else self._state(held)[record.key]
        return tensor

    def _tensors(self, held: ShardView) -> dict[str, Tensor]:
        state = self._state(held)
        return {
            key: value for key, value in state.items() if isinstance(value, Tensor) and not _is_number(key, value, held)
        }

    def _numbers(self, held: ShardView) -> dict[str, Any]:
        state = self._state(held)
        return {key: value for key, value in state.items() if _is_number(key, value, held)}

    def _refuse_parted(self, scalars: Mapping[str, Mapping[str, float]]) -> None:
        """Refuse different numbers for parameters that share one place for them: ZeRO counts for a whole group."""
        seen: dict[int, tuple[str, Mapping[str, float]]] = {}
        for name, numbers in scalars.items():
            other, same = seen.setdefault(id(self._held[name].owner), (name, numbers))
            if same != numbers:
                raise CheckpointError(
                    f"{other} and {name} have been updated differently often ({dict(same)} and {dict(numbers)}), and "
                    "ZeRO keeps one count for both. Resume under ddp or fsdp2."
                )


def _record(name: str, key: str, shape: tuple[int, ...], tensor: Tensor) -> TensorRecord:
    return TensorRecord(name=name, key=key, shape=shape, dtype=dtype_code(tensor.dtype))


def _whole_shape(name: str, key: str, *, tensor: Tensor, held: ShardView) -> tuple[int, ...]:
    if held.is_whole:
        return tuple(tensor.shape)
    if _is_by_rows(tensor, held):
        return tuple(tensor.shape)
    if tensor.shape != held.owner.shape:
        raise CheckpointError(f"{name}: optimizer state `{key}` is not laid out like the parameter and cannot be saved")
    return held.shape


def _is_by_rows(tensor: Tensor, held: ShardView) -> bool:
    """Tell whether it is split by rows as the parameter is, whatever it has in a row (scales of blocks)."""
    return (
        isinstance(tensor, DTensor)
        and isinstance(held.owner, DTensor)
        and tensor.shape[:1] == held.owner.shape[:1]
        and tensor.placements == held.owner.placements
    )


def _is_number(key: str, value: object, held: ShardView) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and (key == "step" or held.owner.dim() > 0)
    return isinstance(value, int | float)


def _number(value: Tensor | float) -> float:
    return value.item() if isinstance(value, Tensor) else value
