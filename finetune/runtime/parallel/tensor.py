"""Tensor parallelism: the ranks of a group share the matrices of every layer (Shoeybi et al., arXiv:1909.08053).

Consecutive ranks form a group. All of them get the same batch and compute the same loss, each with its part of the
weights, so a sample is counted by the first rank of the group only.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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


_size = 1
_mesh: DeviceMesh | None = None
