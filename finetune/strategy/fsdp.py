"""FSDP1, FSDP2 and HSDP: parameters, gradients and optimizer state are sharded over the processes.

FSDP2: Zhao et al., 2023 (arXiv:2304.11277) describe FSDP1; FSDP2 is torch's `fully_shard`.
"""

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from finetune.registry.model import ARITHMETIC
from finetune.runtime.parameters import InitContext
from finetune.strategy.environment import LaunchEnvironment
from finetune.strategy.gradient_sync import GradientReduction
from finetune.strategy.protocol import Expected, PluginSettings, Sharded, empty_weights
from finetune.strategy.reconcile import JobSettings
from finetune.strategy.upstream import gloo_bridge


class FullySharded:
    """FSDP of either version; with a replicate size above 1 it is HSDP, with several copies of the sharded model."""

    def __init__(self, environment: LaunchEnvironment, job: JobSettings) -> None:
        self._environment = environment
        self._precision = job.precision
        self.name = "hsdp" if environment.replicate_size > 1 else f"fsdp{environment.fsdp_version}"

    def accelerator_context(self, *, timeout: timedelta) -> AbstractContextManager[None]:
        """Return the gloo bridge on a machine without an accelerator."""
        return nullcontext() if self._environment.has_device else gloo_bridge(timeout)

    def plugin(self) -> PluginSettings:
        """Return Accelerate's plugin with gradients reduced in fp32, so that precision does not depend on the world."""
        plugin = FullyShardedDataParallelPlugin()
        if self._environment.tensor_size > 1:
            plugin.cpu_ram_efficient_loading = False  # `split_layers` has sent rank 0's weights, a part to each rank
        arithmetic = ARITHMETIC[self._precision]
        if arithmetic.name != "fp32":
            compute = getattr(torch, arithmetic.dtype)
            plugin.mixed_precision_policy = (
                MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
                if self._environment.fsdp_version == 2
                else MixedPrecision(param_dtype=compute, reduce_dtype=torch.float32)
            )
        if self._environment.fsdp_version == 2:
            plugin.forward_prefetch = self._environment.fsdp_forward_prefetch  # which Accelerate 1.15 ignores
        return PluginSettings({"fsdp_plugin": plugin, **self._mesh()})

    def _mesh(self) -> dict[str, Any]:
        """Return the sizes next to sequence or tensor parallelism, which Accelerate does not read from the launcher."""
        copies, tensor = self._environment.replicate_size, self._environment.tensor_size
        if tensor == 1 and (self._environment.sequence_size == 1 or copies == 1):
            return {}
        shards = self._environment.world // (copies * tensor)
        sizes = ParallelismConfig(dp_replicate_size=copies, dp_shard_size=shards, tp_size=tensor)
        return {"parallelism_config": sizes}

    def sharded(self) -> frozenset[Sharded]:
        """Return all three."""
        return frozenset(Sharded)

    def expected(self) -> Expected:
        """Return the requested FSDP version, over all processes."""
        return Expected(
            ("FSDP",),
            self._environment.world,
            "FSDPModule" if self._environment.fsdp_version == 2 else "FullyShardedDataParallel",
            fsdp_version=self._environment.fsdp_version,
            num_copies=self._environment.replicate_size,
            sequence_size=self._environment.sequence_size,
            tensor_size=self._environment.tensor_size,
        )

    def reduction(self) -> GradientReduction:
        """Return EITHER, but LAST for FSDP1 with offloaded parameters.

        There torch replaces the accumulated gradient instead of adding to it (torch 2.13, notes on
        `no_sync` of FullyShardedDataParallel).
        """
        is_replaced = self._environment.fsdp_version == 1 and self._environment.fsdp_offload_params
        return GradientReduction.LAST if is_replaced else GradientReduction.EITHER

    def init_context(self, device: torch.device) -> InitContext:
        """Return the meta device on every rank but the first, if rank 0's weights will be broadcast."""
        is_broadcast = self._environment.fsdp_version == 2 and self._environment.cpu_ram_efficient_loading
        if not is_broadcast or self._environment.rank == 0:
            return InitContext()
        return empty_weights()
