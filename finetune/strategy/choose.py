"""The strategies, and the choice of one by the launcher's settings: one process, DDP, tensor parallelism, FSDP, ZeRO.

FSDP2 is torch's `fully_shard`. ZeRO: Rajbhandari et al., 2019 (arXiv:1910.02054). With an offloaded optimizer,
DeepSpeed compiles its CPU Adam in the first run on a machine, after loading model and data; tools are checked before.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import cpp_extension

from finetune.errors import StrategyError
from finetune.registry.model_choices import ARITHMETIC
from finetune.runtime.optional import require
from finetune.runtime.parameters import InitContext
from finetune.runtime.upstream import BuildLockWatcher, build_locks, extensions_folder, remove_abandoned_lock
from finetune.strategy.environment import LaunchEnvironment
from finetune.strategy.gradient_sync import GradientReduction
from finetune.strategy.protocol import ExpectedSetup, Sharded, Strategy, empty_weights
from finetune.strategy.reconcile import JobSettings, complete_deepspeed_config, offloads_optimizer, refuse_conflicts
from finetune.strategy.upstream import gloo_bridge, use_cpu_devices


def choose_strategy(environment: LaunchEnvironment, job: JobSettings) -> Strategy:
    """Return the strategy that was launched; raises StrategyError if it contradicts the job."""
    strategy: Strategy
    if environment.zero_stage is not None:
        strategy = ZeroRedundancy(environment, job)
    elif environment.is_fsdp:
        strategy = FullySharded(environment, job)
    elif environment.tensor_size > 1:
        strategy = TensorParallel(environment)
    else:
        strategy = DataParallel(environment)
    refuse_conflicts(strategy.name, environment, job)
    return strategy


def describe_strategy(strategy: Strategy) -> str:
    """Return a sentence with the number of processes and what is sharded and replicated.

    >>> describe_strategy(DataParallel(LaunchEnvironment(world=4)))
    'ddp on 4 processes copies parameters, gradients and optimizer state'
    """
    world = strategy.expected.num_processes
    processes = "1 process" if world == 1 else f"{world} processes"
    split = [part.value for part in Sharded if part in strategy.sharded]
    copied = [part.value for part in Sharded if part not in strategy.sharded]
    if world == 1:
        return f"{strategy.name} on 1 process"
    parts = []
    for names, verb in ((split, "splits"), (copied, "copies")):
        if names:
            parts.append(f"{verb} {' and '.join(filter(None, (', '.join(names[:-1]), names[-1])))}")
    expected = strategy.expected
    for name, size in (("sequences", expected.sequence_size), ("layers", expected.tensor_size)):
        if size > 1 and (strategy.name != "tp" or size < world):
            parts.append(f"shares {name} over groups of {size}")
    return f"{strategy.name} on {processes} {', '.join(parts)}"


class DataParallel:
    """A full replica on each process, whose gradients DDP sums over the processes, or a single process."""

    def __init__(self, environment: LaunchEnvironment) -> None:
        self._environment = environment
        self.name, self.expected = "single", ExpectedSetup(("NO",), num_processes=1)
        self.sharded: frozenset[Sharded] = frozenset()
        self.reduction = GradientReduction.LAST  # every process has the whole gradient in any case
        if environment.world > 1 or environment.has_process_group:
            self.name = "ddp"
            self.expected = ExpectedSetup(
                ("MULTI_GPU" if environment.has_device else "MULTI_CPU", "MULTI_XPU", "MULTI_NPU"),
                environment.world,
                "DistributedDataParallel",
                sequence_size=environment.sequence_size,
            )

    def accelerator_context(self, *, timeout: timedelta) -> AbstractContextManager[None]:
        """Return a null context."""
        return nullcontext()

    def plugin(self) -> dict[str, Any]:
        """Return DDP's settings: gradients are views of its buckets, which saves a copy of them."""
        handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        return {"cpu": not self._environment.has_device, "kwargs_handlers": [handler]}

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
        self.expected = ExpectedSetup(  # without a wrapper around the model
            ("MULTI_GPU" if environment.has_device else "MULTI_CPU", "MULTI_XPU", "MULTI_NPU"),
            environment.world,
            num_copies=environment.world // environment.tensor_size,
            tensor_size=environment.tensor_size,
        )

    def plugin(self) -> dict[str, Any]:
        """Return no settings: Accelerate gets a model whose layers are split."""
        return {"cpu": not self._environment.has_device}

    def init_context(self, device: torch.device) -> InitContext:
        """Return construction in host memory by rank 0, which sends the others their parts of the layers."""
        return InitContext() if self._environment.rank == 0 else empty_weights()


class FullySharded:
    """FSDP2; with a replicate size above 1 it is HSDP, with several copies of the sharded model."""

    def __init__(self, environment: LaunchEnvironment, job: JobSettings) -> None:
        self._environment = environment
        self._precision = job.precision
        self.name = "hsdp" if environment.replicate_size > 1 else "fsdp2"
        self.sharded = frozenset(Sharded)
        self.reduction = GradientReduction.EITHER
        self.expected = ExpectedSetup(
            ("FSDP",),
            environment.world,
            "FSDPModule",
            num_copies=environment.replicate_size,
            sequence_size=environment.sequence_size,
            tensor_size=environment.tensor_size,
        )

    def accelerator_context(self, *, timeout: timedelta) -> AbstractContextManager[None]:
        """Return the gloo bridge on a machine without an accelerator."""
        return nullcontext() if self._environment.has_device else gloo_bridge(timeout)

    def plugin(self) -> dict[str, Any]:
        """Return Accelerate's plugin with gradients reduced in fp32, so that precision does not depend on the world."""
        plugin = FullyShardedDataParallelPlugin()
        if self._environment.tensor_size > 1:
            plugin.cpu_ram_efficient_loading = False  # `split_layers` has sent rank 0's weights, a part to each rank
        arithmetic = ARITHMETIC[self._precision]
        if arithmetic.name != "fp32":
            compute = getattr(torch, arithmetic.dtype)
            plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        plugin.forward_prefetch = self._environment.fsdp_forward_prefetch  # which Accelerate 1.15 ignores
        arguments: dict[str, Any] = {"fsdp_plugin": plugin}
        copies, tensor = self._environment.replicate_size, self._environment.tensor_size
        if tensor > 1 or (self._environment.sequence_size > 1 and copies > 1):
            # Accelerate does not read the sizes next to sequence or tensor parallelism from the launcher.
            shards = self._environment.world // (copies * tensor)
            sizes = ParallelismConfig(dp_replicate_size=copies, dp_shard_size=shards, tp_size=tensor)
            arguments["parallelism_config"] = sizes
        return arguments

    def init_context(self, device: torch.device) -> InitContext:
        """Return the meta device on every rank but the first, if rank 0's weights will be broadcast."""
        if not self._environment.cpu_ram_efficient_loading or self._environment.rank == 0:
            return InitContext()
        return empty_weights()


_SPLIT = {
    1: {Sharded.OPTIMIZER},
    2: {Sharded.OPTIMIZER, Sharded.GRADIENTS},
    3: {Sharded.OPTIMIZER, Sharded.GRADIENTS, Sharded.PARAMETERS},
}


class ZeroRedundancy:
    """ZeRO: stage 1 splits optimizer state, stage 2 gradients too, stage 3 parameters too; with or without offload."""

    def __init__(self, environment: LaunchEnvironment, job: JobSettings) -> None:
        self._environment = environment
        self._job = job
        self._stage = environment.zero_stage or 2
        self.name = f"zero{self._stage}"
        self.sharded = frozenset(_SPLIT[self._stage])
        self.reduction = GradientReduction.LAST if self._stage == 1 else GradientReduction.EVERY
        self.expected = ExpectedSetup(
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

    def plugin(self) -> dict[str, Any]:
        """Return Accelerate's plugin, with its DeepSpeed config completed by the job's settings."""
        try:
            plugin = DeepSpeedPlugin()
        except ValueError as error:
            raise StrategyError(f"Accelerate rejects the DeepSpeed part of the accelerate config: {error}") from error
        filled = complete_deepspeed_config(plugin.deepspeed_config, world=self._environment.world, job=self._job)
        plugin.deepspeed_config.update(filled)
        return {"deepspeed_plugin": plugin}

    def init_context(self, device: torch.device) -> InitContext:
        """Return a context in which stage 3 partitions each parameter when it is created (zero.Init)."""
        return InitContext(gather=_gather) if self._stage == 3 else InitContext()


def _watch_builds() -> None:
    """Remove locks of killed builds and log waiting for others, in one process per machine."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local == 0:
        for lock in build_locks(extensions_folder()):
            remove_abandoned_lock(lock, log=_log)
    if local <= 1:  # rank 1 of the machine logs while rank 0 compiles
        BuildLockWatcher(log=_log).start()


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _gather(parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
    zero = require("deepspeed", extra="deepspeed", purpose="DeepSpeed ZeRO").zero
    partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    context: AbstractContextManager[Any] = zero.GatheredParameters(partitioned, modifier_rank=0)
    return context


@dataclass(frozen=True)
class BuildTools:
    """The tools that compile an extension."""

    has_ninja: bool
    compiler: str | None  # the path of `CXX` or `c++`, if it exists
    nvcc: str | None


def build_tools() -> BuildTools:
    """Return the tools that torch would compile with."""
    home = cpp_extension.CUDA_HOME
    nvcc = None if home is None else shutil.which(str(Path(home, "bin", "nvcc")))
    return BuildTools(shutil.which("ninja") is not None, shutil.which(os.environ.get("CXX", "c++")), nvcc)


def missing_for_cpu_adam() -> str | None:
    """Return the missing tool for DeepSpeed's CPU Adam, and the command that installs it; None if all exist.

    DeepSpeed asks for ninja even where the extension is compiled. Its builder needs no nvcc (0.19).
    """
    tools, missing = build_tools(), None
    if not tools.has_ninja:
        missing = "ninja, with which DeepSpeed compiles its CPU Adam, is not on the PATH. Run `pip install ninja`."
    elif tools.compiler is None and not any(extensions_folder().glob("*/cpu_adam/*.so")):
        missing = "no C++ compiler (`c++`, or that of CXX) for DeepSpeed's CPU Adam. Run `apt-get install g++`."
    if missing is None:
        return None  # saves the seconds of importing DeepSpeed
    installed: Any = require("deepspeed.git_version_info", extra="deepspeed", purpose="DeepSpeed ZeRO")
    return None if installed.installed_ops.get("cpu_adam", False) else missing  # a precompiled wheel has it
