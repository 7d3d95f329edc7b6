"""The state layout of FSDP2 and tensor parallelism (DTensor)."""

import math
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

from finetune.checkpoint.sharding.state_layout import (
    ShardRange,
    ShardView,
    StateLayout,
    named_buffers,
    named_parameters,
    replicated_view,
)
from finetune.errors import CheckpointError
from finetune.runtime.parallel import tensor_group
from finetune.runtime.parameters import divides, local_part, local_tensor


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
