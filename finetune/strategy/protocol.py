"""The seam of how a run is spread over processes."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any, Protocol

import torch

from finetune.runtime.parameters import InitContext
from finetune.strategy.gradient_sync import GradientReduction


class Sharded(Enum):
    """What a strategy shards over the processes instead of replicating it."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"


@dataclass(frozen=True)
class PluginSettings:
    """What `Accelerator()` is given besides the precision."""

    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Expected:
    """What must be found after construction; anything else is refused by name."""

    distributed_types: tuple[str, ...]  # names of accelerate.DistributedType
    num_processes: int
    model_class: str | None = None  # a class that the prepared model must be an instance of
    zero_stage: int | None = None
    fsdp_version: int | None = None
    num_copies: int = 1  # of what is sharded: HSDP keeps several
    sequence_size: int = 1  # processes that share the tokens of every row

    @property
    def num_shards(self) -> int:
        """Return the number of processes that share one copy."""
        return self.num_processes // self.num_copies

    @property
    def data_parallel_size(self) -> int:
        """Return the number of microbatches that are computed at a time, each by one process or by those of a group."""
        return self.num_processes // self.sequence_size


class Strategy(Protocol):
    """How a run is spread. Built from what the launcher set; the loop never asks which one it is."""

    name: str

    def accelerator_context(self, *, timeout: timedelta) -> AbstractContextManager[None]:
        """Return the context in which the Accelerator is built; process groups created there get the timeout."""

    def plugin(self) -> PluginSettings:
        """Return what `Accelerator()` is given."""

    def sharded(self) -> frozenset[Sharded]:
        """Return what is sharded over the processes."""

    def expected(self) -> Expected:
        """Return what must be found after construction: Accelerate can silently build plain DDP instead."""

    def reduction(self) -> GradientReduction:
        """Return after which microbatches of a step gradients can be reduced over the processes."""

    def init_context(self, device: torch.device) -> InitContext:
        """Return how the model is brought into memory on this rank, which computes on the device."""
