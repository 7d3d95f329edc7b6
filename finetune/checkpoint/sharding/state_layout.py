"""A description of this rank's training state, common to all strategies, by canonical parameter name.

Every strategy splits a flattened tensor into runs of consecutive elements (FSDP2 by rows, ZeRO by elements),
so one description is enough: a rank holds elements [start, stop). A tensor gathered by these numbers does not depend
on the strategy.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from finetune.errors import CheckpointError
from finetune.runtime.optional import no_op
from finetune.runtime.parameters import canonical_name

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
