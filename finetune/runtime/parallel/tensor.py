"""Tensor parallelism: the ranks of a group share the matrices of every layer (Shoeybi et al., arXiv:1909.08053).

Consecutive ranks form a group. All of them get the same batch and compute the same loss, each with its part of the
weights, so a sample is counted by the first rank of the group only.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional

from finetune.runtime import distributed


@dataclass(frozen=True)
class TensorGroup(distributed.RankGroup):
    """The group of ranks that share weights."""

    mesh: DeviceMesh | None = None  # of this group; None for a group of one rank

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return the group for collectives."""
        assert self.mesh is not None, "a group of several ranks is open"
        return self.mesh.get_group()


def open_tensor_groups(size: int, *, device_type: str, mesh: DeviceMesh | None = None) -> None:
    """Open groups of `size` consecutive ranks each; 1 opens none. Collective.

    `mesh` is Accelerate's, over which FSDP2 shards what the groups split; it requires that both have one mesh.
    """
    global _size, _mesh
    _size, _mesh = size, None
    if size > 1:
        whole = mesh or init_device_mesh(
            device_type, (distributed.world() // size, size), mesh_dim_names=("data", "tp")
        )
        _mesh = whole["tp"]


def tensor_group() -> TensorGroup:
    """Return this rank's group; of one rank if none was opened."""
    return TensorGroup(*distributed.place_in_group(_size), _mesh)


def shared_input(inputs: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the inputs, of which every rank uses all; their gradient is the sum of the ranks'."""
    local: Tensor = DTensor.from_local(inputs, mesh, [Replicate()], run_check=False).to_local(
        grad_placements=[Partial()]
    )
    return local


def gathered(part: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    """Return the whole of which every rank has a part: a summand, or a slice."""
    part_of_all = DTensor.from_local(part, mesh, [placement], run_check=False)
    whole: Tensor = part_of_all.redistribute(placements=[Replicate()]).to_local()
    return whole


class SplitHead(nn.Linear):
    """A head of which every rank has the rows of its part of the vocabulary; its output is gathered from all of them.

    A loss that needs no gathered logits reads the rows themselves (`task/lm_loss/head.py`).
    """

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
    """The tokens of a vocabulary whose logits this rank computes; the ranks of the group compute those of all.

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

    def log_sum_exp(self, own: Tensor) -> Tensor:
        """Return the log-sum-exp of every row, [rows], from that of this rank's logits. Collective."""
        highest = self.reduce_(own.clone(), dist.ReduceOp.MAX)
        return highest + self.reduce_((own - highest).exp_()).log_()

    def locate(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels' columns in this rank's logits, 0 for those of other ranks, and which are its own."""
        columns = labels - self.first
        is_own = (columns >= 0) & (columns < self.size)
        return columns.where(is_own, 0), is_own


_size = 1
_mesh: DeviceMesh | None = None
