"""A description of this rank's training state, common to all strategies, by canonical parameter name.

Every strategy splits a flattened tensor into runs of consecutive elements (FSDP2 by rows, ZeRO by elements),
so one description is enough: a rank holds elements [start, stop). A tensor gathered by these numbers does not depend
on the strategy.

ZeRO's flat fp32 partitions have consecutive parts of many parameters. DeepSpeed's own accessors (`safe_get_full_*`)
read the same tensors, but need linked optimizer state, which exists only after the first step, and return the whole
tensor on every rank. Seen with DeepSpeed 0.19.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from finetune.checkpoint.upstream import restore_cpu_adam_step, step_zero3_partitions, update_zero3_copies
from finetune.errors import CheckpointError
from finetune.registry.optimizers import state_of_class
from finetune.runtime.optional import no_op
from finetune.runtime.parallel import tensor_group
from finetune.runtime.parameters import AVERAGE, AVERAGE_DECAY, canonical_name, divides, local_part, local_tensor

T = TypeVar("T")


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by canonical name; tied ones once, under the first of their names."""
    return _unique(_without_engine(model).named_parameters())


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers by canonical name."""
    buffers: list[tuple[str, Tensor]] = []
    for prefix, module in _without_engine(model).named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers.append((f"{prefix}.{name}" if prefix else name, buffer))
    return _unique(buffers)


def _without_engine(model: nn.Module) -> nn.Module:
    """Return the model inside DDP or DeepSpeed's engine."""
    is_engine = any(base.__name__ == "DeepSpeedEngine" for base in type(model).__mro__)
    inner = model.module if isinstance(model, DistributedDataParallel) or is_engine else model
    assert isinstance(inner, nn.Module)
    return inner


def _unique(tensors: Iterable[tuple[str, T]]) -> dict[str, T]:
    named: dict[str, T] = {}
    for name, value in tensors:
        plain = canonical_name(name)
        if plain in named:
            raise CheckpointError(
                f"two tensors of the model have the same name {plain} once wrapper prefixes are removed. "
                "Rename the submodule that is named like a wrapper (`module`, `_orig_mod`)."
            )
        named[plain] = value
    return named


class ShardRange(NamedTuple):
    """Elements [first, last) of the rows [start, stop) of a tensor, seen as rows of `width` elements.

    A range of consecutive elements has rows of one element. Where FSDP2 shards rows that are each split, it has
    [low, high) of these elements, flat.
    """

    start: int
    stop: int
    width: int = 1
    first: int = 0
    last: int = 1
    low: int = 0
    high: int | None = None

    def of(self, rows: Tensor) -> Tensor:
        """Return its elements, flat, from the whole rows, given flat."""
        if self.width == 1:
            return rows
        return rows.view(-1, self.width)[:, self.first : self.last].reshape(-1)[self.low : self.high]

    def rectangles(self) -> Iterator["ShardRange"]:
        """Yield it in parts, in order, each with the same columns of all its rows."""
        if self.high is None:
            yield self
            return
        size = self.last - self.first
        for row in range(self.start, self.stop):
            before = (row - self.start) * size
            low, high = max(self.low - before, 0), min(self.high - before, size)
            if low < high:
                yield ShardRange(row, row + 1, self.width, self.first + low, self.first + high)


@dataclass(frozen=True)
class ShardView:
    """The shard of a parameter on one rank: elements [start, stop) of the flattened parameter, or columns of it."""

    tensor: Tensor  # holds the value, and is the key of the optimizer's state; one for many parameters in ZeRO
    local_view: Callable[[Tensor], Tensor]  # from a tensor laid out like `tensor` to a flat view of this shard
    shape: tuple[int, ...]  # of the full parameter
    start: int
    stop: int
    is_trained: bool
    is_replicated: bool  # every rank holds all of it
    is_copy: bool = False  # another rank holds the same elements (HSDP, whole parameters next to split ones)
    columns: tuple[int, int, int, int, int | None] | None = None  # `width` to `high` of a range of rows

    @property
    def range(self) -> ShardRange:
        """Return its elements."""
        if self.columns is None:
            return ShardRange(self.start, self.stop)
        return ShardRange(self.start, self.stop, *self.columns)


@dataclass(frozen=True)
class StateLayout:
    """The shards of this rank, and callbacks for reading and writing them."""

    shards: Mapping[str, ShardView]  # by canonical name, in the model's order on every rank; with frozen parameters
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # persistent ones
    reshard: Callable[[], None] = no_op  # makes the shards valid by freeing gathered parameters; not collective
    create_optimizer_state: Callable[[], None] | None = None  # None: as for any torch optimizer
    update_model_copies: Callable[[], None] = (
        no_op  # copies written values to the tensors that training reads. Collective.
    )


def replicated_view(parameter: nn.Parameter) -> ShardView:
    """Return the view of a parameter that every rank holds completely."""
    return ShardView(
        tensor=parameter,
        local_view=lambda tensor: tensor.detach().reshape(-1),
        shape=tuple(parameter.shape),
        start=0,
        stop=parameter.numel(),
        is_trained=parameter.requires_grad,
        is_replicated=True,
    )


def fsdp2_layout(model: nn.Module) -> StateLayout:
    """Return the layout of FSDP2 and tensor parallelism; raises CheckpointError for other DTensors."""
    _reshard_fsdp2(model)
    return StateLayout(
        shards={name: _dtensor_view(name, parameter) for name, parameter in named_parameters(model).items()},
        buffers=named_buffers(model),
        reshard=partial(_reshard_fsdp2, model),
    )


def _dtensor_view(name: str, parameter: nn.Parameter) -> ShardView:
    if not isinstance(parameter, DTensor):
        return replicated_view(parameter)
    placements: list[Any] = [placement for placement in parameter.placements if not isinstance(placement, Replicate)]
    # Matrices that are stacked in the rows are each split by rows; FSDP2 may shard that again.
    is_split = (parameter.device_mesh.mesh_dim_names or ("",))[-1] == "tp"
    is_packed = is_split and isinstance(parameter.placements[-1], _StridedShard)
    inner = next((placement for placement in reversed(placements) if placement.dim or is_packed), None)
    if not all(divides(placement, 0) for placement in placements if placement is not inner):
        raise CheckpointError(
            f"{name}: has the placements {parameter.placements}; only sharding by rows, and by columns, can be saved"
        )
    if inner is None:
        (first, num_rows), row = local_part(parameter, dimension=0), math.prod(parameter.shape[1:])  # in elements
        own = ShardRange(first * row, (first + num_rows) * row)
    else:
        own = _range_within_rows(parameter, inner, is_sharded=len(placements) > 1)
    num_own = sum((part.stop - part.start) * (part.last - part.first) for part in own.rectangles())
    assert num_own == parameter.to_local().numel(), f"{name}: {parameter.placements} is not sharded as expected"
    return ShardView(
        tensor=parameter,
        local_view=lambda tensor: local_tensor(tensor).view(-1),
        shape=tuple(parameter.shape),
        start=own.start,
        stop=own.stop,
        is_trained=parameter.requires_grad,
        is_replicated=False,
        is_copy=_is_copy(parameter),
        columns=None if inner is None else own[2:],
    )


def _range_within_rows(parameter: DTensor, inner: Any, *, is_sharded: bool) -> ShardRange:
    """Return what this rank has of a tensor that a tensor-parallel group splits evenly within its rows.

    The columns are all dimensions from the split one on; where several matrices are packed in that (gate and up), each
    is a row. `is_sharded`: FSDP2 shards what the rank has of them, by rows of the parameter.
    """
    mesh, packed = parameter.device_mesh, getattr(inner, "split_factor", 1)
    blocks = math.prod(parameter.shape[1 : inner.dim]) * packed  # rows for each index of the first dimension
    first, num_rows = local_part(parameter, dimension=0) if inner.dim else (0, 1)
    width = parameter.numel() // (blocks * (parameter.shape[0] if inner.dim else 1))
    own = width // mesh.size(-1)
    left = own * mesh.get_local_rank(mesh.ndim - 1)
    columns = ShardRange(first * blocks, (first + num_rows) * blocks, width, left, left + own)
    if inner.dim or not is_sharded:
        return columns
    row, total = math.prod(parameter.shape[1:]), packed * own
    shard = -(-total // row // mesh.size(-2)) * row
    low = min(shard * mesh.get_local_rank(mesh.ndim - 2), total)
    return columns._replace(low=low, high=min(low + shard, total))


def _is_copy(parameter: DTensor) -> bool:
    """Return whether a lower rank holds the same elements.

    What the ranks of a group have not split is on a mesh without them, one per rank of a group. What they have split,
    and FSDP2 does not shard, is on a mesh of the group alone.
    """
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    is_split = "tp" in (mesh.mesh_dim_names or ())
    group = tensor_group()
    if (group.index > 0 and not is_split) or (group.number > 0 and is_split and mesh.ndim == 1):
        return True
    return any(
        index > 0
        for index, placement in zip(coordinate, parameter.placements, strict=True)
        if isinstance(placement, Replicate)
    )


def _reshard_fsdp2(model: nn.Module) -> None:
    """Free gathered parameters: after an evaluation, the root module still has them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def zero12_layout(engine: Any) -> StateLayout:
    """Return the layout of ZeRO-1 and -2: parameters replicated, their fp32 master weights partitioned."""
    zero = engine.optimizer
    flats = [group["params"][0] for group in zero.optimizer.param_groups]
    groups = zero.bit16_groups if hasattr(zero, "bit16_groups") else zero.bf16_groups
    flat_of = {id(parameter): flat for group, flat in zip(groups, flats, strict=True) for parameter in group}

    def update_copies() -> None:
        zero.update_lp_params()
        restore_cpu_adam_step(zero.optimizer)

    return StateLayout(
        shards={
            name: _zero12_view(parameter, flat_of.get(id(parameter)))
            for name, parameter in named_parameters(engine).items()
        },
        buffers=named_buffers(engine),
        create_optimizer_state=partial(create_state_by_step, zero.optimizer),
        update_model_copies=update_copies,
    )


def zero3_layout(engine: Any) -> StateLayout:
    """Return the layout of ZeRO-3, whose parameters are also partitioned."""
    zero = engine.optimizer

    def create_state() -> None:
        with zero_gradients(zero.fp32_partitioned_groups_flat), no_learning_rate(zero.optimizer):
            step_zero3_partitions(zero)

    def update_copies() -> None:
        update_zero3_copies(zero)
        restore_cpu_adam_step(zero.optimizer)

    return StateLayout(
        shards={name: _zero3_view(parameter, zero) for name, parameter in named_parameters(engine).items()},
        buffers=named_buffers(engine),
        create_optimizer_state=create_state,
        update_model_copies=update_copies,
    )


def _zero12_view(parameter: nn.Parameter, flat: Tensor | None) -> ShardView:
    if flat is None:
        return replicated_view(parameter)
    mapping: Any = getattr(parameter, "_hp_mapping", None)  # None: no element of it is in this rank's partition
    start = mapping.lp_fragment_address.start if mapping is not None else 0
    count = mapping.hp_fragment_address.numel if mapping is not None else 0
    offset = mapping.hp_fragment_address.start if mapping is not None else 0
    return ShardView(
        tensor=flat,
        local_view=_narrow(offset, count),
        shape=tuple(parameter.shape),
        start=start,
        stop=start + count,
        is_trained=True,
        is_replicated=False,
    )


def _zero3_view(parameter: Any, zero: Any) -> ShardView:
    size = parameter.partition_numel()  # the last partition is padded
    start = min(size * zero._get_param_partition_rank(parameter), parameter.ds_numel)
    stop = min(start + size, parameter.ds_numel)
    tensor, offset = parameter.ds_tensor, 0
    position = zero.grad_position.get(zero.get_param_id(parameter)) if parameter.requires_grad else None
    if position is not None:
        tensor, offset = zero.fp32_partitioned_groups_flat[position[0]], position[1]
    return ShardView(
        tensor=tensor,
        local_view=_narrow(offset, stop - start),
        shape=tuple(parameter.ds_shape),
        start=start,
        stop=stop,
        is_trained=position is not None,
        is_replicated=False,
    )


def _narrow(offset: int, count: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.detach().reshape(-1).narrow(0, offset, count)


_ADAM_CLASSES = (torch.optim.Adam, torch.optim.AdamW)
"""Exactly these classes: their state is numbers and tensors laid out like the parameter, the same for each."""


def create_state_by_step(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer create its state for all parameters, by a step with zero gradients and learning rate 0.

    Only the optimizer knows keys, dtypes and devices of its state. Some optimizers change parameters even in
    such a step, so the caller must overwrite parameters and state afterwards.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with zero_gradients(parameters), no_learning_rate(optimizer):
        optimizer.step()


def create_empty_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the same state faster but uninitialized, for a caller that overwrites all of it.

    Adam's moments are allocated without gradients and without a pass over their memory; the keys and dtypes come from
    an optimizer of the same class with a single element.
    """
    # Hooks may keep further state, such as an average of the weights.
    has_hooks = bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
    if type(optimizer) not in _ADAM_CLASSES or has_hooks:
        create_state_by_step(optimizer)
        return
    build: Any = type(optimizer)
    for group in optimizer.param_groups:
        examples: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
        for parameter in group["params"]:
            kind = (parameter.dtype, parameter.device)
            if kind not in examples:
                single = torch.zeros(1, dtype=kind[0], device=kind[1], requires_grad=True)
                single.grad = torch.zeros_like(single)
                example = build([{**group, "params": [single]}])
                with no_learning_rate(example):
                    example.step()
                examples[kind] = example.state[single]
            optimizer.state[parameter] = {
                key: torch.empty_like(parameter, dtype=value.dtype) if value.dim() else value.clone()
                for key, value in examples[kind].items()
            }


def expected_state_keys(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the keys of the state that the optimizer will keep for each element of a parameter.

    Empty for unknown optimizers, and for optimizers that keep less per element (Adafactor, 8-bit AdamW).
    """
    average = (AVERAGE,) if any(AVERAGE_DECAY in group for group in optimizer.param_groups) else ()
    return (*state_of_class(type(optimizer).__name__).keys_for(optimizer.defaults), *average)


@contextmanager
def zero_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Set the gradients to zeros, and restore them afterwards (ZeRO-Offload keeps its buffers there)."""
    before = {parameter: parameter.grad for parameter in parameters}
    for parameter in before:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient


@contextmanager
def no_learning_rate(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Set the learning rate of every group to 0, and restore it afterwards."""
    before: list[Any] = [group.get("lr") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate
