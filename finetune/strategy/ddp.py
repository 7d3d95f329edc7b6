"""One process, DDP and tensor parallelism: a process group without FSDP or DeepSpeed.

Under DDP every process has the whole model, and gradients are summed over the processes.
"""

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
from accelerate.utils import DistributedDataParallelKwargs

from finetune.runtime.parameters import InitContext
from finetune.strategy.environment import LaunchEnvironment
from finetune.strategy.gradient_sync import GradientReduction
from finetune.strategy.protocol import Expected, PluginSettings, Sharded, empty_weights


class DataParallel:
    """A full replica on each process, or a single process."""

    def __init__(self, environment: LaunchEnvironment) -> None:
        self._environment = environment
        self._is_distributed = environment.world > 1 or environment.has_process_group
        self.name = "ddp" if self._is_distributed else "single"

    def accelerator_context(self, *, timeout: timedelta) -> AbstractContextManager[None]:
        """Return a null context."""
        return nullcontext()

    def plugin(self) -> PluginSettings:
        """Return DDP's settings: gradients are views of its buckets, which saves a copy of them."""
        handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        return PluginSettings({"cpu": not self._environment.has_device, "kwargs_handlers": [handler]})

    def sharded(self) -> frozenset[Sharded]:
        """Return the empty set."""
        return frozenset()

    def expected(self) -> Expected:
        """Return DDP over all processes, or no distribution for a single process."""
        if not self._is_distributed:
            return Expected(("NO",), num_processes=1)
        distributed_type = "MULTI_GPU" if self._environment.has_device else "MULTI_CPU"
        return Expected(
            (distributed_type, "MULTI_XPU", "MULTI_NPU"),
            self._environment.world,
            "DistributedDataParallel",
            sequence_size=self._environment.sequence_size,
        )

    def reduction(self) -> GradientReduction:
        """Return LAST: every process has the whole gradient in any case."""
        return GradientReduction.LAST

    def init_context(self, device: torch.device) -> InitContext:
        """Return construction directly on the device: DDP needs the whole model on every rank.

        Each rank maps the weight files, whose pages the ranks of a machine share, so they are read only once per
        machine and not copied in host memory.
        """
        return InitContext(device=device)


class TensorParallel(DataParallel):
    """Matrices of the layers are split over the processes of a group, which compute the same microbatch.

    Several groups are copies of one another: gradients are averaged over them at the end of a step.
    """

    def __init__(self, environment: LaunchEnvironment) -> None:
        super().__init__(environment)
        self.name = "tp"

    def plugin(self) -> PluginSettings:
        """Return no settings: Accelerate gets a model whose layers are split."""
        return PluginSettings({"cpu": not self._environment.has_device})

    def sharded(self) -> frozenset[Sharded]:
        """Return all three: those of the layers; embeddings, head and norms are whole."""
        return frozenset(Sharded)

    def expected(self) -> Expected:
        """Return a process group without a wrapper around the model."""
        return Expected(
            ("MULTI_GPU" if self._environment.has_device else "MULTI_CPU", "MULTI_XPU", "MULTI_NPU"),
            self._environment.world,
            num_copies=self._environment.world // self._environment.tensor_size,
            tensor_size=self._environment.tensor_size,
        )

    def init_context(self, device: torch.device) -> InitContext:
        """Return construction in host memory by rank 0, which sends the others their parts of the layers."""
        return InitContext() if self._environment.rank == 0 else empty_weights()
