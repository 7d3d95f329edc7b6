"""How a model comes into memory on this rank: what a strategy decides and the model wing carries out."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Construction:
    """How the model is brought into memory so that no machine holds it more often than it must.

    `context` is entered while the modules are built. `is_hollow`: this rank builds the modules with empty parameters,
    which are filled from rank 0 when the model is prepared. `gather` is entered with parameters whose values are to be
    written (ZeRO-3 partitions them at birth); rank 0's values are the ones kept.
    """

    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    is_hollow: bool = False
    gather: Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]] = nullcontext
