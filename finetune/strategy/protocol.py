"""The interface of strategies, which distribute a run over processes."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Protocol

import torch
from accelerate import init_empty_weights

from finetune.runtime.parameters import InitContext
from finetune.strategy.gradient_sync import GradientReduction


class Sharded(Enum):
    """Parts that a strategy shards over the processes instead of replicating them."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"


@dataclass(frozen=True)
class ExpectedSetup:
    """The expected result of the construction; a different one is an error."""

    distributed_types: tuple[str, ...]  # names of accelerate.DistributedType
    num_processes: int
    model_class: str | None = None  # a class that the prepared model must be an instance of
    zero_stage: int | None = None
    num_copies: int = 1  # of the sharded model: HSDP has several
    sequence_size: int = 1  # processes that share the tokens of every row
    tensor_size: int = 1  # processes that share the matrices of every layer

    @property
    def num_shards(self) -> int:
        """Return the number of processes that share one copy."""
        return self.num_processes // self.num_copies

    @property
    def data_parallel_size(self) -> int:
        """Return the number of microbatches that are computed in parallel, each by one process or group."""
        return self.num_processes // (self.sequence_size * self.tensor_size)


def empty_weights() -> InitContext:
    """Return how a rank creates a model whose weights it gets from rank 0."""
    return InitContext(context=lambda: init_empty_weights(include_buffers=False), on_meta_device=True)


class Strategy(Protocol):
    """The distribution of a run. It follows from the launcher's settings; the loop does not depend on it."""

    name: str
    sharded: frozenset[Sharded]  # the parts that are sharded over the processes
    expected: ExpectedSetup  # the result of the construction: Accelerate can silently build plain DDP instead
    reduction: GradientReduction  # the microbatches of a step after which gradients can be reduced

    def accelerator_context(self, *, timeout: timedelta) -> AbstractContextManager[None]:
        """Return the context in which the Accelerator is built; process groups created there get the timeout."""

    def plugin(self) -> dict[str, Any]:
        """Return the arguments of `Accelerator()` in addition to the precision."""

    def init_context(self, device: torch.device) -> InitContext:
        """Return how the model is created on this rank, which computes on the device."""
