"""Groups of ranks that share the rows or the layers of a microbatch, and rows of several packed samples.

Ulysses sequence parallelism: the ranks of a group share the tokens of every row (Jacobs et al., arXiv:2309.14509). Each
computes its slice of the tokens; only in attention do they exchange slices for heads.

Tensor parallelism: the ranks of a group share the matrices of every layer (Shoeybi et al., arXiv:1909.08053). All
compute the same loss, each with its part of the weights, so a sample is counted by the first rank of the group only.

Consecutive ranks form a group, so that their communication stays within a machine if possible. All of them get the
same batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional

from finetune.runtime import distributed
from finetune.runtime.distributed import RankGroup


def open_sequence_groups(size: int) -> None:
    """Open groups of `size` consecutive ranks each; 1 opens none. Collective."""
    global _sequence_size, _sequence_process_group
    _sequence_size, _sequence_process_group = size, None
    if size > 1:
        _sequence_process_group, _ = dist.new_subgroups(group_size=size)  # type: ignore[no-untyped-call]  # torch has no types for it


def sequence_group() -> RankGroup:
    """Return this rank's group, which shares the tokens of a row; of one rank if none was opened."""
    return RankGroup(*distributed.place_in_group(_sequence_size))


_sequence_size = 1
_sequence_process_group: dist.ProcessGroup | None = None


def swap_blocks(blocks: Tensor) -> Tensor:
    """Return block r of every rank of the group, in rank order, on the rank of index r: [ranks, ...], with gradient.

    An all-to-all of equal blocks, also for the gradient. Within `distributed.local_collectives` the result is zeros of
    the same shape, without communication. Collective over the group.
    """
    swapped: Tensor = _SwapBlocks.apply(blocks)  # type: ignore[no-untyped-call]  # torch has no types for it
    return swapped


class _SwapBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks: Tensor) -> Tensor:
        return _exchange(blocks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _exchange(gradients[0])


def _exchange(blocks: Tensor) -> Tensor:
    if distributed.are_collectives_local:
        return torch.zeros_like(blocks)
    assert _sequence_process_group is not None and len(blocks) == _sequence_size, "a slice belongs to an open group"
    sent = blocks.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=_sequence_process_group)
    return received


@dataclass(frozen=True)
class TensorGroup(RankGroup):
    """The group of ranks that share weights."""

    mesh: DeviceMesh | None = None  # of this group; None for a group of one rank
    copies: dist.ProcessGroup | None = None  # the ranks with the same weights in other groups, unless FSDP2 shards them

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return the group for collectives."""
        assert self.mesh is not None, "a group of several ranks is open"
        return self.mesh.get_group()


def open_tensor_groups(size: int, *, device_type: str, mesh: DeviceMesh | None = None) -> None:
    """Open groups of `size` consecutive ranks each; 1 opens none. Collective.

    `mesh` is Accelerate's, over which FSDP2 shards what the groups split; it requires that both have one mesh.
    """
    global _tensor_size, _tensor_mesh, _copies
    _tensor_size, _tensor_mesh, _copies = size, None, None
    if size > 1:
        num_groups = distributed.world() // size
        whole = mesh or init_device_mesh(device_type, (num_groups, size), mesh_dim_names=("data", "tp"))
        _tensor_mesh = whole["tp"]
        _copies = whole["data"].get_group() if mesh is None and num_groups > 1 else None


def tensor_group() -> TensorGroup:
    """Return this rank's group; of one rank if none was opened."""
    return TensorGroup(*distributed.place_in_group(_tensor_size), _tensor_mesh, _copies)


def shared_input(inputs: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the inputs, all used by every rank; their gradient is the sum of the ranks'."""
    local: Tensor = DTensor.from_local(inputs, mesh, [Replicate()], run_check=False).to_local(
        grad_placements=[Partial()]
    )
    return local


def gathered(part: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    """Return the whole tensor from each rank's part: a summand, or a slice."""
    part_of_all = DTensor.from_local(part, mesh, [placement], run_check=False)
    whole: Tensor = part_of_all.redistribute(placements=[Replicate()]).to_local()
    return whole


class SplitHead(nn.Linear):
    """A head split by rows of the vocabulary over the ranks; its output is gathered from all of them."""

    weight: Any  # a DTensor
    mesh: DeviceMesh  # of the group

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary."""
        bias: Any = self.bias
        part = functional.linear(self.share(hidden), self.weight.to_local(), None if bias is None else bias.to_local())
        return gathered(part, self.mesh, Shard(-1))

    def share(self, hidden: Tensor) -> Tensor:
        """Return the hidden states, which every rank multiplies by its rows; the ranks sum their gradient."""
        return shared_input(hidden, self.mesh)


@dataclass(frozen=True)
class VocabularyPart:
    """The tokens of a vocabulary whose logits this rank computes; the ranks of the group compute all of them.

    Ranks exchange three numbers per target, and no logits (Shoeybi et al., 2019, arXiv:1909.08053).
    """

    group: dist.ProcessGroup
    first: int
    size: int
    total: int  # tokens of all parts

    def reduce_(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce the values over the ranks, in place, and return them. Collective."""
        dist.all_reduce(values, operation, group=self.group)
        return values

    def log_sum_exp(self, local_sums: Tensor) -> Tensor:
        """Return the log-sum-exp of every row, [rows], from that of this rank's logits. Collective."""
        highest = self.reduce_(local_sums.clone(), dist.ReduceOp.MAX)
        return highest + self.reduce_((local_sums - highest).exp_()).log_()

    def locate(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels' columns in this rank's logits, 0 for other ranks' labels, and which are its own."""
        columns = labels - self.first
        is_own = (columns >= 0) & (columns < self.size)
        return columns.where(is_own, 0), is_own


_tensor_size = 1
_tensor_mesh: DeviceMesh | None = None
_copies: dist.ProcessGroup | None = None


SAMPLE_LENGTHS = "sample_lengths"
"""The argument of a model's forward with the lengths of the samples."""


class SampleLengths:
    """The number of tokens of each sample of the row, as integers on the host: no host-device synchronization.

    Not a tuple: a compiler would specialize on its length and recompile for every number of samples. If the model gets
    one of several equal slices of the row, the lengths belong to the whole row.
    """

    __slots__ = ("num_slices", "values")

    def __init__(self, values: Sequence[int], *, num_slices: int = 1) -> None:
        self.values = list(values)
        self.num_slices = num_slices
