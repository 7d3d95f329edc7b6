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
        self.sharded = frozenset(Sharded)
        # FSDP1 with offloaded parameters replaces the accumulated gradient instead of adding to it (torch 2.13, notes
        # on `no_sync` of FullyShardedDataParallel).
        is_replaced = environment.fsdp_version == 1 and environment.fsdp_offload_params
        self.reduction = GradientReduction.LAST if is_replaced else GradientReduction.EITHER
        self.expected = Expected(
            ("FSDP",),
            environment.world,
            "FSDPModule" if environment.fsdp_version == 2 else "FullyShardedDataParallel",
            fsdp_version=environment.fsdp_version,
            num_copies=environment.replicate_size,
            sequence_size=environment.sequence_size,
            tensor_size=environment.tensor_size,
        )

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
        arguments: dict[str, Any] = {"fsdp_plugin": plugin}
        copies, tensor = self._environment.replicate_size, self._environment.tensor_size
        if tensor > 1 or (self._environment.sequence_size > 1 and copies > 1):
            # Accelerate does not read the sizes next to sequence or tensor parallelism from the launcher.
            shards = self._environment.world // (copies * tensor)
            sizes = ParallelismConfig(dp_replicate_size=copies, dp_shard_size=shards, tp_size=tensor)
            arguments["parallelism_config"] = sizes
        return PluginSettings(arguments)

    def init_context(self, device: torch.device) -> InitContext:
        """Return the meta device on every rank but the first, if rank 0's weights will be broadcast."""
        is_broadcast = self._environment.fsdp_version == 2 and self._environment.cpu_ram_efficient_loading
        if not is_broadcast or self._environment.rank == 0:
            return InitContext()
        return empty_weights()
