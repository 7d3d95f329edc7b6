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
        self.name, self.expected = "single", Expected(("NO",), num_processes=1)
        self.sharded: frozenset[Sharded] = frozenset()
        self.reduction = GradientReduction.LAST  # every process has the whole gradient in any case
        if environment.world > 1 or environment.has_process_group:
            self.name = "ddp"
            self.expected = Expected(
                ("MULTI_GPU" if environment.has_device else "MULTI_CPU", "MULTI_XPU", "MULTI_NPU"),
                environment.world,
                "DistributedDataParallel",
                sequence_size=environment.sequence_size,
            )

    def accelerator_context(self, *, timeout: timedelta) -> AbstractContextManager[None]:
        """Return a null context."""
        return nullcontext()

    def plugin(self) -> PluginSettings:
        """Return DDP's settings: gradients are views of its buckets, which saves a copy of them."""
        handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        return PluginSettings({"cpu": not self._environment.has_device, "kwargs_handlers": [handler]})

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
        self.sharded = frozenset(Sharded)  # parts of the layers; embeddings, head and norms are whole
        self.expected = Expected(  # without a wrapper around the model
            ("MULTI_GPU" if environment.has_device else "MULTI_CPU", "MULTI_XPU", "MULTI_NPU"),
            environment.world,
            num_copies=environment.world // environment.tensor_size,
            tensor_size=environment.tensor_size,
        )

    def plugin(self) -> PluginSettings:
        """Return no settings: Accelerate gets a model whose layers are split."""
        return PluginSettings({"cpu": not self._environment.has_device})

    def init_context(self, device: torch.device) -> InitContext:
        """Return construction in host memory by rank 0, which sends the others their parts of the layers."""
        return InitContext() if self._environment.rank == 0 else empty_weights()
