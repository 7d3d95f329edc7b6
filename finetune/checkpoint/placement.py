"""Where the training state lies on this rank, said in one way for every strategy.

Every strategy splits a tensor, flattened, into runs of consecutive elements (FSDP2 by rows, FSDP1 and ZeRO by
elements), so one word is enough: a rank holds elements [start, stop). A tensor that is gathered by these numbers is
free of the strategy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn


def nothing() -> None:
    """Do nothing: for strategies that need no such step."""


@dataclass(frozen=True)
class Held:
    """One parameter as this rank holds it: elements [start, stop) of the flattened whole."""

    owner: Tensor  # holds the value, and is the key of the optimizer's state; ZeRO's is shared by many parameters
    part: Callable[[Tensor], Tensor]  # from a tensor laid out like the owner to a flat view of what is this parameter's
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    stop: int
    is_trained: bool
    is_whole: bool  # every rank holds all of it


@dataclass(frozen=True)
class Placement:
    """Where everything is, and what has to be done around reading and writing it."""

    held: Mapping[str, Held]  # by canonical name, the model's order, the same on every rank; frozen ones too
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # persistent ones
    contributes: bool = True  # False on a rank that holds a copy of what another rank contributes (HSDP)
    settle: Callable[[], None] = nothing  # puts the values to where `Held` says they are; local
    make_state: Callable[[], None] | None = None  # has the optimizer make its first state; None: the ordinary way
    publish: Callable[[], None] = nothing  # hands written values on to the copies that training uses. Collective.


def whole(parameter: nn.Parameter) -> Held:
    """Return the parameter as one that every rank holds completely."""
    return Held(
        owner=parameter,
        part=lambda tensor: tensor.detach().reshape(-1),
        shape=tuple(parameter.shape),
        start=0,
        stop=parameter.numel(),
        is_trained=parameter.requires_grad,
        is_whole=True,
    )
