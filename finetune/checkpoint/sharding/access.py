"""Access to the training state of `Accelerator.prepare`; the types of its objects determine the layout."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from finetune.checkpoint.format.tensor_file import BUFFER, PARAMETER, TensorRecord, dtype_code
from finetune.checkpoint.sharding.state_layout import (
    ShardRange,
    ShardView,
    StateLayout,
    create_empty_state,
    create_state_by_step,
    expected_state_keys,
    fsdp2_layout,
    named_buffers,
    named_parameters,
    replicated_view,
    zero3_layout,
    zero12_layout,
)
from finetune.errors import CheckpointError
from finetune.registry.optimizers import state_of_class


def state_layout(model: Any) -> StateLayout:
    """Return the state layout of the prepared model on this rank."""
    stage = _zero_stage(model)
    if stage:
        return zero3_layout(model) if stage == 3 else zero12_layout(model)
    is_split = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if is_split or any(isinstance(module, FSDPModule) for module in model.modules()):
        return fsdp2_layout(model)
    wrapper = getattr(model, "optimizer", None)
    if wrapper is not None and not isinstance(wrapper, torch.optim.Optimizer):  # it has another layout of fp32 masters
        raise CheckpointError(f"DeepSpeed stage 0 with {type(wrapper).__name__} cannot be saved. Write stage 1.")
    shards = {name: replicated_view(parameter) for name, parameter in named_parameters(model).items()}
    return StateLayout(shards=shards, buffers=named_buffers(model))


def _zero_stage(model: Any) -> int:
    stage = getattr(model, "zero_optimization_stage", None)
    return int(stage()) if callable(stage) else 0


_DEEPSPEED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class LossScale:
    """Reads and writes the loss scale of fp16 and its counters as plain numbers; without one, they are empty."""

    def __init__(self, *, scaler: Any, deepspeed: Any) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._deepspeed = deepspeed if getattr(deepspeed, "dynamic", False) else None

    def read(self) -> dict[str, float]:
        """Return `scale` and the counters of GradScaler or DeepSpeed; empty if losses are not scaled."""
        if self._scaler is not None:
            return dict(self._scaler.state_dict())
        if self._deepspeed is not None:
            counters = {name: getattr(self._deepspeed, name) for name in _DEEPSPEED}
            return {"scale": counters["cur_scale"], **counters}
        return {}

    def write(self, values: Mapping[str, float]) -> None:
        """Restore these numbers; between the two scalers, only the scale itself is transferred."""
        if not values:
            return
        if self._scaler is not None:
            own = self._scaler.state_dict()
            self._scaler.load_state_dict({**own, **{name: values[name] for name in own if name in values}})
        if self._deepspeed is not None:
            for name in _DEEPSPEED:
                setattr(self._deepspeed, name, values.get(name, getattr(self._deepspeed, name)))
            self._deepspeed.cur_scale = values["scale"]


Scalars = dict[str, dict[str, float]]
"""Numbers in the optimizer's state (`step`), by parameter name and key."""


class StateAccess:
    """Reads and writes the state of a model and its torch optimizer by tensor name, under any strategy.

    Each rank holds elements [start, stop) of every flattened tensor. `device` is one from which tensors can be sent to
    other ranks.
    """

    def __init__(
        self, layout: StateLayout, optimizer: torch.optim.Optimizer, *, device: torch.device, loss_scale: LossScale
    ) -> None:
        self._layout = layout
        self._optimizer = optimizer
        self._shards = {name: shard for name, shard in layout.shards.items() if shard.is_trained}
        self._names_by_tensor: dict[int, list[str]] = {}  # parameters by the id of the tensor that keys their state
        for name, shard in self._shards.items():
            self._names_by_tensor.setdefault(id(shard.tensor), []).append(name)
        self.device = device
        self.loss_scale = loss_scale
        self.begin_reading = layout.reshard  # makes the state readable
        self.finish_writing = layout.update_model_copies  # after `begin_writing` and all `write`s. Collective.

    def records(self) -> list[TensorRecord]:
        """Return parameters, their optimizer state and buffers, in the model's order, with full shapes.

        Other ranks may have more optimizer state.
        """
        records: list[TensorRecord] = []
        for name, shard in self._shards.items():
            records.append(_record(name, PARAMETER, shard.shape, shard.tensor))
            for key, tensor in sorted(self._tensors(shard).items()):
                records.append(_record(name, key, _full_shape(name, key, tensor=tensor, shard=shard), tensor))
        buffers = self._layout.buffers.items()
        records.extend(_record(name, BUFFER, tuple(buffer.shape), buffer) for name, buffer in buffers)
        return records

    def expected_state_keys(self) -> tuple[str, ...]:
        """Return the keys of the state that the optimizer will keep per element of a parameter; empty if unknown."""
        return expected_state_keys(self._optimizer)

    def is_replicated(self, record: TensorRecord) -> bool:
        """Return whether every rank holds all of the tensor."""
        return record.key == BUFFER or self._shards[record.name].is_replicated

    def is_copy(self, record: TensorRecord) -> bool:
        """Return whether this rank's elements are copies of another rank's, which gathering does not use."""
        return self._shards[record.name].is_copy

    def local_range(self, record: TensorRecord) -> ShardRange:
        """Return this rank's elements."""
        if self.is_replicated(record):
            return ShardRange(0, record.num_elements)
        shard = self._shards[record.name]
        if shard.columns is not None:
            return shard.range
        size = max(1, math.prod(shard.shape))  # a state may have fewer elements per row than the parameter
        return ShardRange(shard.start * record.num_elements // size, shard.stop * record.num_elements // size)

    def read(self, record: TensorRecord) -> Tensor:
        """Return this rank's elements, flat, on any device; read-only; empty if this rank has no such state."""
        own = self.local_range(record)
        if own.start == own.stop:
            return torch.empty(0)
        if record.key == BUFFER:
            return self._layout.buffers[record.name].detach().reshape(-1)
        shard = self._shards[record.name]
        return shard.local_view(self._tensor(record))

    @torch.no_grad()
    def write(self, record: TensorRecord, values: Tensor) -> None:
        """Write this rank's elements, given flat."""
        if not values.numel():
            return
        if record.key == BUFFER:
            buffer = self._layout.buffers[record.name]
            buffer.copy_(values.view(buffer.shape))
            return
        target = self._tensor(record)
        if self.is_replicated(record):
            target.copy_(values.view(target.shape))  # also if the tensor is not contiguous
        else:
            self._shards[record.name].local_view(target).copy_(values)

    def adopt(self, record: TensorRecord, values: Tensor) -> bool:
        """Use the full tensor, given flat, as the optimizer's state without copying, if dtype, device and layout match.

        Returns whether that was possible; if it was, the caller must not write to it any more.
        """
        if record.part != "optimizer" or not self.is_replicated(record):
            return False
        target = self._tensor(record)
        has_same_layout = (values.dtype, values.device) == (target.dtype, target.device) and target.is_contiguous()
        if has_same_layout and type(target) is Tensor and record.key in self._state(self._shards[record.name]):
            self._state(self._shards[record.name])[record.key] = values.view(target.shape)
            return True
        return False

    def read_scalars(self) -> Scalars:
        """Return the numbers in the optimizer's state of the parameters in which this rank has elements."""
        scalars: Scalars = {}
        for name, shard in self._shards.items():
            if shard.is_replicated or shard.start < shard.stop:
                numbers = {
                    key: value.item() if isinstance(value, Tensor) else value
                    for key, value in self._state(shard).items()
                    if _is_number(key, value, shard)
                }
                if numbers:
                    scalars[name] = numbers
        return scalars

    @torch.no_grad()
    def write_scalars(self, scalars: Scalars) -> None:
        """Write the optimizer's numbers, each with the type that the optimizer uses.

        Raises CheckpointError if parameters that share one need different ones: ZeRO has one step count per parameter
        group.
        """
        seen: dict[int, tuple[str, Mapping[str, float]]] = {}
        for name, numbers in scalars.items():
            other, others = seen.setdefault(id(self._shards[name].tensor), (name, numbers))
            if others != numbers:
                raise CheckpointError(
                    f"{other} and {name} have different update counts ({dict(others)} and {dict(numbers)}), but ZeRO "
                    "keeps one count for both. Resume under ddp or fsdp2."
                )
        for name, numbers in scalars.items():
            state = self._state(self._shards[name])
            for key, number in numbers.items():
                if isinstance(state.get(key), Tensor):
                    state[key].fill_(number)
                elif state:
                    state[key] = type(state.get(key, number))(number)

    @torch.no_grad()
    def discard_state(self, names: Iterable[str]) -> None:
        """Remove the state of these parameters, which have not been updated yet; set their part of shared ones to 0."""
        discarded = set(names)
        for sharing in self._names_by_tensor.values():
            shard = self._shards[sharing[0]]
            if discarded.issuperset(sharing):
                self._optimizer.state.pop(shard.tensor, None)
                continue
            for name in discarded.intersection(sharing):
                for tensor in self._tensors(shard).values():
                    self._shards[name].local_view(tensor).zero_()

    def begin_writing(self) -> None:
        """Create optimizer state to write into; parameters may change and must all be written afterwards."""
        self._layout.reshard()
        if self._layout.create_optimizer_state is not None:
            self._layout.create_optimizer_state()
        elif all(shard.is_replicated for shard in self._shards.values()):
            create_empty_state(self._optimizer)
        else:  # there may be padding, which is not loaded
            create_state_by_step(self._optimizer)

    def _state(self, shard: ShardView) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(shard.tensor, {})
        return state

    def _tensor(self, record: TensorRecord) -> Tensor:
        shard = self._shards[record.name]
        if record.key == PARAMETER:
            return shard.tensor
        key, _, part = record.key.partition(".")
        tensor: Tensor = self._state(shard)[key]
        return getattr(tensor, part) if part else tensor

    def _tensors(self, shard: ShardView) -> dict[str, Tensor]:
        """Return the tensors by key; the components of a quantized one as `exp_avg.codes`, `exp_avg.scale`, ..."""
        tensors: dict[str, Tensor] = {}
        for key, value in self._state(shard).items():
            if not isinstance(value, Tensor) or _is_number(key, value, shard):
                continue
            if hasattr(value, "__tensor_flatten__") and not isinstance(value, DTensor):
                tensors |= {f"{key}.{part}": getattr(value, part) for part in value.__tensor_flatten__()[0]}
            else:
                tensors[key] = value
        return tensors


def build_access(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> StateAccess:
    """Return access to the state of the prepared model and optimizer.

    Raises CheckpointError if this combination cannot be saved, so that a run fails at its start, not at a save.
    """
    layout = state_layout(model)
    zero = getattr(model, "optimizer", None) if _zero_stage(model) else None
    inner = zero.optimizer if zero is not None else getattr(optimizer, "optimizer", optimizer)
    trained = [shard for shard in layout.shards.values() if shard.is_trained]
    if not trained:
        raise CheckpointError("no parameter is trained, so there is nothing to save")
    is_sharded = not all(shard.is_replicated for shard in trained)
    if is_sharded and not state_of_class(type(inner).__name__).is_elementwise:
        raise CheckpointError(
            f"train.optimizer.name: the state of {type(inner).__name__} cannot be saved while parameters are sharded. "
            "Write `adamw` or `sgd`, or launch with accelerate_configs/ddp.yaml."
        )
    return StateAccess(
        layout,
        inner,
        device=accelerator.device,
        loss_scale=LossScale(scaler=accelerator.scaler, deepspeed=getattr(zero, "loss_scaler", None)),
    )


def _record(name: str, key: str, shape: tuple[int, ...], tensor: Tensor) -> TensorRecord:
    return TensorRecord(name=name, key=key, shape=shape, dtype=dtype_code(tensor.dtype))


def _full_shape(name: str, key: str, *, tensor: Tensor, shard: ShardView) -> tuple[int, ...]:
    has_same_rows = (  # sharded by rows like the parameter, with any row length (block scales)
        isinstance(tensor, DTensor)
        and isinstance(shard.tensor, DTensor)
        and tensor.shape[:1] == shard.tensor.shape[:1]
        and tensor.placements == shard.tensor.placements
    )
    if shard.is_replicated or has_same_rows:
        return tuple(tensor.shape)
    if tensor.shape != shard.tensor.shape:
        raise CheckpointError(
            f"{name}: optimizer state `{key}` has another layout than the parameter and cannot be saved"
        )
    return shard.shape


def _is_number(key: str, value: object, shard: ShardView) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and (key == "step" or shard.tensor.dim() > 0)
    return isinstance(value, int | float)
