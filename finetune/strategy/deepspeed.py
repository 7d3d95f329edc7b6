"""DeepSpeed ZeRO (Rajbhandari et al., 2019, arXiv:1910.02054), stages 1 to 3, with or without offload."""

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin
from torch import nn

from finetune.errors import StrategyError
from finetune.runtime.optional import require
from finetune.runtime.parameters import InitContext
from finetune.runtime.upstream import BuildLockWatcher, clear_build_locks
from finetune.strategy.cpu_adam import missing_for_cpu_adam
from finetune.strategy.environment import LaunchEnvironment
from finetune.strategy.gradient_sync import GradientReduction
from finetune.strategy.protocol import Expected, PluginSettings, Sharded
from finetune.strategy.reconcile import JobSettings, complete_deepspeed_config, offloads_optimizer
from finetune.strategy.upstream import gloo_bridge, use_cpu_devices

_SPLIT = {
    1: {Sharded.OPTIMIZER},
    2: {Sharded.OPTIMIZER, Sharded.GRADIENTS},
    3: {Sharded.OPTIMIZER, Sharded.GRADIENTS, Sharded.PARAMETERS},
}


class ZeroRedundancy:
    """ZeRO: stage 1 splits optimizer state, stage 2 gradients too, stage 3 parameters too."""

    def __init__(self, environment: LaunchEnvironment, job: JobSettings) -> None:
        self._environment = environment
        self._job = job
        self._stage = environment.zero_stage or 2
        self.name = f"zero{self._stage}"
        self.sharded = frozenset(_SPLIT[self._stage])
        self.reduction = GradientReduction.LAST if self._stage == 1 else GradientReduction.EVERY
        self.expected = Expected(
            ("DEEPSPEED",),
            environment.world,
            "DeepSpeedEngine",
            zero_stage=self._stage,
            sequence_size=environment.sequence_size,
        )

    def accelerator_context(self, *, timeout: timedelta) -> AbstractContextManager[None]:
        """Return the gloo bridge on a machine without an accelerator; raises MissingPackage without DeepSpeed.

        Raises StrategyError if the optimizer is offloaded and DeepSpeed cannot compile it on this machine.
        """
        _watch_builds()
        if not self._environment.has_device:
            use_cpu_devices()  # DeepSpeed chooses its device when it is first imported
        require("deepspeed", extra="deepspeed", purpose="DeepSpeed ZeRO")
        if offloads_optimizer(self._environment.deepspeed) and (missing := missing_for_cpu_adam()):
            raise StrategyError(f"{self.name} with an offloaded optimizer cannot start on this machine: {missing}")
        return nullcontext() if self._environment.has_device else gloo_bridge(timeout)

    def plugin(self) -> PluginSettings:
        """Return Accelerate's plugin, with its DeepSpeed config completed by the job's settings."""
        try:
            plugin = DeepSpeedPlugin()
        except ValueError as error:
            raise StrategyError(f"Accelerate rejects the DeepSpeed part of the accelerate config: {error}") from error
        filled = complete_deepspeed_config(plugin.deepspeed_config, world=self._environment.world, job=self._job)
        plugin.deepspeed_config.update(filled)
        return PluginSettings({"deepspeed_plugin": plugin})

    def init_context(self, device: torch.device) -> InitContext:
        """Return a context in which stage 3 partitions each parameter when it is created (zero.Init)."""
        return InitContext(gather=_gather) if self._stage == 3 else InitContext()


def _watch_builds() -> None:
    """Remove locks of killed builds and log waiting for others, in one process per machine."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local == 0:
        clear_build_locks(log=_log)
    if local <= 1:  # rank 1 of the machine logs while rank 0 compiles
        BuildLockWatcher(log=_log).start()


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _gather(parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
    zero = require("deepspeed", extra="deepspeed", purpose="DeepSpeed ZeRO").zero
    partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    context: AbstractContextManager[Any] = zero.GatheredParameters(partitioned, modifier_rank=0)
    return context
