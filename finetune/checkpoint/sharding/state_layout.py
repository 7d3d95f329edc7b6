"""Where the training state is on this rank, described in the same way for every strategy, by canonical parameter name.

Every strategy splits a flattened tensor into runs of consecutive elements (FSDP2 by rows, FSDP1 and ZeRO by
elements), so one description is enough: a rank holds elements [start, stop). A tensor gathered by these numbers does
not depend on the strategy.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from finetune.errors import CheckpointError
from finetune.runtime.parameters import canonical_name

T = TypeVar("T")


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by canonical name; tied ones appear once, under the first of their names."""
    return _unique(unwrap_model(model).named_parameters())


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the model's state (the persistent ones) by canonical name."""
    found: list[tuple[str, Tensor]] = []
    for prefix, module in unwrap_model(model).named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found.append((f"{prefix}.{name}" if prefix else name, buffer))
    return _unique(found)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model without DDP or DeepSpeed's engine around it."""
    is_engine = any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)
    inner = model.module if isinstance(model, DistributedDataParallel) or is_engine else model
    assert isinstance(inner, nn.Module)
    return inner


def _unique(found: Iterable[tuple[str, T]]) -> dict[str, T]:
    named: dict[str, T] = {}
    for name, value in found:
        plain = canonical_name(name)
        if plain in named:
            raise CheckpointError(
                f"two tensors of the model are both called {plain} once the wrappers' names are taken away. "
                "A submodule that is named like a wrapper (`module`, `_orig_mod`) must be renamed."
            )
        named[plain] = value
    return named


def do_nothing() -> None:
    """Do nothing: for strategies that need no such step."""


@dataclass(frozen=True)
class ShardView:
    """One parameter as this rank holds it: elements [start, stop) of the flattened whole."""

    owner: Tensor  # holds the value, and is the key of the optimizer's state; ZeRO's is shared by many parameters
    part: Callable[[Tensor], Tensor]  # from a tensor laid out like the owner to a flat view of what is this parameter's
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    stop: int
    is_trained: bool
    is_whole: bool  # every rank holds all of it


@dataclass(frozen=True)
class StateLayout:
    """Where everything is, and what has to be done around reading and writing it."""

    held: Mapping[str, ShardView]  # by canonical name, the model's order, the same on every rank; frozen ones too
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # persistent ones
    contributes: bool = True  # False on a rank that holds a copy of what another rank contributes (HSDP)
    settle: Callable[[], None] = do_nothing  # puts the values to where `ShardView` says they are; local
    create_optimizer_state: Callable[[], None] | None = (
        None  # has the optimizer make its first state; None: the ordinary way
    )
    publish: Callable[[], None] = do_nothing  # hands written values on to the copies that training uses. Collective.


def unsharded(parameter: nn.Parameter) -> ShardView:
    """Return the parameter as one that every rank holds completely."""
    return ShardView(
        owner=parameter,
        part=lambda tensor: tensor.detach().reshape(-1),
        shape=tuple(parameter.shape),
        start=0,
        stop=parameter.numel(),
        is_trained=parameter.requires_grad,
        is_whole=True,
    )
