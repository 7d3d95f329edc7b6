"""Slabs of a linear head's rows: their logits, and what their gradients amount to."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finetune.task.head_output import Finish
from finetune.task.losses import TokenLoss

SLAB_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
"""Bytes of one slab's logits in float32, at most."""

MOST_ROWS = {"cpu": 256, "cuda": 8192}
"""Rows of a slab at most: more are no faster (`benchmarks/head.py`), and on a CPU they leave the cache."""

LEAST_ROWS = 64
"""Rows of a slab at least, however large the vocabulary: fewer would read and write the weights for next to nothing."""


@dataclass(frozen=True)
class Ask:
    """What is to be worked out of a head's rows."""

    loss: TokenLoss
    finish: Finish
    dtype: torch.dtype  # of the matrix products; sums and probabilities are float32
    rows: int  # of a slab


def rows_per_slab(vocabulary: int, device: torch.device) -> int:
    """Return how many rows a slab has."""
    kind = device.type if device.type in SLAB_BYTES else "cuda"
    return max(LEAST_ROWS, min(MOST_ROWS[kind], SLAB_BYTES[kind] // (4 * vocabulary)))


@dataclass
class Slab:
    """Some of the rows and the room in which their logits stand; the next slab has the same room."""

    rows: Tensor  # [slab, hidden], in the dtype of the products, as the weights
    weight: Tensor
    bias: Tensor | None
    finish: Finish
    room: Tensor  # [at least slab, vocabulary], in that dtype
    wide: Tensor  # the same in float32

    @classmethod
    def without_room(cls, rows: Tensor, weight: Tensor, ask: Ask) -> "Slab":
        """Return all rows, whose logits are not asked for."""
        return cls(rows.to(ask.dtype), weight.to(ask.dtype), None, ask.finish, rows, rows)

    def logits(self) -> Tensor:
        """Return the logits, [slab, vocabulary]; in float32 where the model does something with them."""
        output = torch.mm(self.rows, self.weight.t(), out=self.room[: len(self.rows)])
        if self.bias is not None:
            output.add_(self.bias)
        return output if self.finish.is_nothing else self.finish.into_(output.float())

    def softmax(self, logits: Tensor) -> Tensor:
        """Return the probabilities in float32; these may be overwritten."""
        return torch.softmax(logits, dim=1, dtype=torch.float32, out=self.wide[: len(logits)])


def slabs(rows: Tensor, weight: Tensor, bias: Tensor | None, ask: Ask) -> Iterator[tuple[slice, Slab]]:
    """Yield the slabs one after another, each with its place among the rows."""
    size, vocabulary = min(ask.rows, len(rows)), len(weight)
    room = rows.new_empty(size, vocabulary, dtype=ask.dtype)
    wide = rows.new_empty(size, vocabulary, dtype=torch.float32)
    cast_weight, cast_bias = weight.to(ask.dtype), None if bias is None else bias.to(ask.dtype)
    for start in range(0, len(rows), max(1, size)):
        part = slice(start, min(start + size, len(rows)))
        yield part, Slab(rows[part].to(ask.dtype), cast_weight, cast_bias, ask.finish, room, wide)


class Gradients:
    """The gradients that are wanted, added up over the slabs; None for those that are not.

    Of the weights' they are added up in float32, also where the weights are half floats.
    """

    def __init__(self, ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        for_rows, for_weight, for_bias = ctx.needs_input_grad[:3]
        self._dtype = weight.dtype
        self._rows = torch.empty_like(rows) if for_rows else None
        self._weight: Tensor | None = None
        self._wanted = weight if for_weight else None
        self._bias = bias.new_zeros(bias.shape, dtype=torch.float32) if for_bias and bias is not None else None

    def __bool__(self) -> bool:
        return any(each is not None for each in (self._rows, self._wanted, self._bias))

    @property
    def made(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows, weights and bias, and two None."""
        if self._wanted is not None and self._weight is None:  # no rows
            self._weight = torch.zeros_like(self._wanted)
        weight, bias = (None if each is None else each.to(self._dtype) for each in (self._weight, self._bias))
        return self._rows, weight, bias, None, None

    def add(self, gradient: Tensor, slab: Slab, part: slice) -> None:
        """Add what the slab's gradient at the head's output, float32, amounts to."""
        cast = gradient.to(slab.rows.dtype)
        if self._rows is not None:
            self._rows[part] = torch.mm(cast, slab.weight)
        if self._wanted is not None:
            self._add_to_weight(cast, slab.rows, is_only=self._rows is not None and len(cast) == len(self._rows))
        if self._bias is not None:
            self._bias.add_(gradient.sum(dim=0))

    def _add_to_weight(self, gradient: Tensor, rows: Tensor, *, is_only: bool) -> None:
        is_wide = gradient.dtype == torch.float32
        if self._weight is None:
            product = torch.mm(gradient.t(), rows)
            self._weight = product if is_wide or is_only else product.float()
        elif is_wide:
            self._weight.addmm_(gradient.t(), rows)
        elif gradient.is_cuda:  # products of half floats are added up in float32 by the product itself
            torch.addmm(self._weight, gradient.t(), rows, out_dtype=torch.float32, out=self._weight)
        else:
            self._weight.add_(torch.mm(gradient.t(), rows))
