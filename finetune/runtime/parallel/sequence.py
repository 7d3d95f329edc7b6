"""Ulysses sequence parallelism: the ranks of a group share the tokens of every row (Jacobs et al., arXiv:2309.14509).

Consecutive ranks form a group, so that their communication stays within a machine if possible. All of them get the
same batch, and each computes its slice of the tokens; only in attention do they exchange slices for heads.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from finetune.runtime import distributed


class SequenceGroup(distributed.RankGroup):
    """The group of ranks that share the tokens of a row."""


def open_sequence_groups(size: int) -> None:
    """Open groups of `size` consecutive ranks each; 1 opens none. Collective."""
    global _size, _opened
    _size, _opened = size, None
    if size > 1:
        _opened, _ = dist.new_subgroups(group_size=size)  # type: ignore[no-untyped-call]  # torch has no types for it


def sequence_group() -> SequenceGroup:
    """Return this rank's group; of one rank if none was opened."""
    return SequenceGroup(*distributed.place_in_group(_size))


_size = 1
_opened: dist.ProcessGroup | None = None


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
    if distributed.are_collectives_local():
        return torch.zeros_like(blocks)
    assert _opened is not None and len(blocks) == _size, "a slice belongs to an open group"
    sent = blocks.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=_opened)
    return received
