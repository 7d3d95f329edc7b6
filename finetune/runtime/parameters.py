"""The initialization of parameters, and their full shape, local rows and name under every strategy.

Also the keys of optimizer states and parameter groups that several packages read.
"""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True)
class InitContext:
    """How the model is created so that no machine has more copies of it than necessary.

    `context` is entered while the modules are built. `on_meta_device`: this rank builds the modules with empty
    parameters, which are filled from rank 0 when the model is prepared. `gather` is entered to write the values
    of parameters (ZeRO-3 partitions them at creation); rank 0's values are kept. `device` is that of weights from
    files; None: the CPU, from which the strategy moves or shards them.
    """

    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    on_meta_device: bool = False
    gather: Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]] = nullcontext
    device: torch.device | None = None


AVERAGE = "average"
"""The key of a parameter's average in its optimizer state, next to `exp_avg`: float32, sharded like the parameter."""

AVERAGE_DECAY = "average_decay"
"""The key of a parameter group with the decay of the average in the next update; absent without an average."""

NOT_YET_UNFROZEN = "waits"
"""The key of a parameter group that marks it as still frozen: excluded from gradient norm and update."""


_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_checkpoint_wrapped_module)\.")


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of the whole parameter; under ZeRO-3 the parameter itself is empty."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def full_numel(parameter: nn.Parameter) -> int:
    """Return the number of elements of the whole parameter."""
    return math.prod(full_shape(parameter))


def num_values(parameter: nn.Parameter) -> int:
    """Return the number of values of the whole parameter; bitsandbytes packs several into each element."""
    packed = getattr(parameter, "quant_state", None)
    return full_numel(parameter) if packed is None else math.prod(packed.shape)


def local_rows(tensor: Tensor) -> tuple[int, int] | None:
    """Return the first local row of this rank and their number; None if the tensor is not sharded by rows."""
    if not isinstance(tensor, DTensor) or not tensor.dim():
        return 0, tensor.shape[0] if tensor.dim() else 1
    is_by_rows = all(isinstance(placement, Replicate) or divides(placement, 0) for placement in tensor.placements)
    return local_part(tensor, dimension=0) if is_by_rows else None


def divides(placement: Placement, dimension: int) -> bool:
    """Return whether the placement shards the dimension of a tensor."""
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dimension


def local_part(tensor: DTensor, *, dimension: int) -> tuple[int, int]:
    """Return the first local index of this rank in a dimension, and the number of indices.

    Each axis of the mesh divides as `chunk` does. FSDP2 shards what tensor parallelism has split: there the axis that
    comes first divides last (`_StridedShard`).
    """
    first, count = 0, tensor.shape[dimension]
    axes = sorted(enumerate(tensor.placements), key=lambda axis: isinstance(axis[1], _StridedShard))
    for axis, placement in axes:
        if divides(placement, dimension):
            size = -(-count // tensor.device_mesh.size(axis))
            start = min(size * tensor.device_mesh.get_local_rank(axis), count)
            first, count = first + start, min(size, count - start)
    return first, count


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or the tensor itself, without its graph; both share memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def canonical_name(name: str) -> str:
    """Return the parameter's name in the plain model, without the prefixes of wrappers."""
    return _WRAPPERS.sub("", name)


_BLOCK_ELEMENTS = 1 << 20


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite; waits for the device.

    Works block by block, to save memory; a finite sum makes the elementwise check unnecessary.

    >>> is_finite(torch.tensor([1.0, float("inf")])), is_finite(torch.tensor([3e38, 3e38]))
    (False, True)
    """
    if not tensor.is_floating_point():
        return True
    blocks = torch.split(tensor.reshape(-1), _BLOCK_ELEMENTS)
    return all(math.isfinite(float(block.sum())) or bool(block.isfinite().all()) for block in blocks)
