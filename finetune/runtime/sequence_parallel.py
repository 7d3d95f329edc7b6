"""Ulysses sequence parallelism: the ranks of a group share the tokens of every row (Jacobs et al., arXiv:2309.14509).

Consecutive ranks are a group, so that what they exchange stays inside a machine where it can. All of them are given the
same batch, and each computes its slice of the tokens; in attention alone they exchange slices for heads.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from finetune.runtime import distributed


@dataclass(frozen=True)
class SequenceGroup:
    """How many ranks share the tokens of a row, and which of them this one is."""

    size: int = 1
    place: int = 0
    number: int = 0  # of the group among all
    num_groups: int = 1


def open_sequence_groups(size: int) -> None:
    """Open groups of `size` consecutive ranks each; 1 opens none. Collective."""
    global _size, _opened
    _size, _opened = size, None
    if size > 1:
        _opened, _ = dist.new_subgroups(group_size=size)  # type: ignore[no-untyped-call]  # torch has no types for it


def sequence_group() -> SequenceGroup:
    """Return this rank's group; of one rank where none was opened."""
    rank, world = distributed.rank(), distributed.world()
    return SequenceGroup(_size, rank % _size, rank // _size, world // _size)


_size = 1
_opened: dist.ProcessGroup | None = None


def swap_blocks(blocks: Tensor) -> Tensor:
    """Return block r of every rank of the group, in their order, for the rank at place r: [ranks, ...], with gradient.

    An all-to-all of equal blocks; the gradient takes the same way back. A rank that answers alone
    (`distributed.answering_alone`) gets zeros of the same shape, and nothing is sent. Collective over the group.
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
    if distributed.answers_alone():
        return torch.zeros_like(blocks)
    assert _opened is not None and len(blocks) == _size, "a slice belongs to an open group"
    sent = blocks.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=_opened)
    return received
