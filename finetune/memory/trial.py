"""A trial: forward and backward pass of one batch, as in a step with optimizer state, without lasting effects.

If every rank has whole parameters (one process, DDP, ZeRO-1 and -2), the unwrapped model runs with aliases of its
trained parameters: gradients go to the aliases, so that neither DDP's buckets nor ZeRO's hooks see them, and
collectives of a task are local. Without communication, no rank can block.

If parameters are sharded (FSDP, ZeRO-3), each layer is gathered, so the real model runs and its gradients are dropped.
A rank that runs out of memory there ends the run; `run/microbatch_size.py` explains how `auto` avoids that.
"""

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from finetune.config.run_config import RunConfig
from finetune.config.sections.train import TrainSection
from finetune.data.batch import Batch
from finetune.errors import StrategyError
from finetune.memory.limits import MemoryLimit, is_out_of_memory
from finetune.model.batch_norm import GhostBatchNorm
from finetune.model.size import AVERAGE_BYTES, optimizer_state_bytes
from finetune.runtime import distributed
from finetune.runtime.parameters import local_tensor
from finetune.runtime.seeds import keep_random_state
from finetune.strategy.gradient_sync import accumulate_gradients
from finetune.strategy.protocol import Strategy
from finetune.train.meters import keep_peak_memory
from finetune.train.step import StepTask

LATER_BYTES = 128 << 20
"""Memory of loading and writing threads, imports of the loader (`datasets`, 70 MB) and fragmentation.

A run of 10 steps with a checkpoint at each took 92 to 123 MiB of it, without `datasets`.
"""


_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class Trial:
    """A model that is ready to train, and the components of its run for a trial."""

    accelerator: Accelerator
    model: Any  # as Accelerate prepared it
    unwrapped_model: Any
    optimizer: Any
    before_batch: Callable[[Batch], None]
    reduces_every_microbatch: bool
    task: StepTask
    is_sharded: bool  # the parameters are
    frees_gradients: bool  # in the backward pass, as soon as each is computed
    extra_bytes: int  # not yet allocated: optimizer state, buffers of ZeRO

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of this rank's accumulated gradients."""
        if self.frees_gradients or _is_engine(self.model):
            return 0
        return sum(local_tensor(weight).nbytes for weight in self.model.parameters() if weight.requires_grad)

    def peaks(self, batch: Batch, *, num_batches: int, memories: tuple[MemoryLimit, ...]) -> tuple[int, ...] | None:
        """Return this rank's peak for each memory limit; None if it ran out of memory.

        `num_batches` is the number of microbatches of a step; the task may read all of them. Collective under a
        strategy that shards parameters.
        """
        model, device = self.unwrapped_model, self.accelerator.device
        python_state, numpy_state = random.getstate(), np.random.get_state()
        try:
            # not compiled, since the shapes of compiled code depend on which comes first
            eager = torch.compiler.set_stance("force_eager")
            with keep_peak_memory(), keep_model_state(model), keep_random_state(), eager:
                measurements = [memory.start() for memory in memories]
                extra = torch.empty(self.extra_bytes, dtype=torch.uint8, device=device).fill_(0)
                run = self._run_sharded if self.is_sharded else self._run_unsharded
                run(batch.to(device), num_batches)
                del extra
                return tuple(measured() for measured in measurements)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            gc.collect()  # objects that an exception referred to
            if device.type == "cuda":
                torch.cuda.empty_cache()
        return None

    def _run_unsharded(self, batch: Batch, num_batches: int) -> None:
        is_wrapped = isinstance(self.model, DistributedDataParallel) or _is_engine(self.model)
        inner = self.model.module if is_wrapped else self.model
        with aliased_parameters(inner) as aliases, distributed.local_collectives():
            for alias in aliases:
                if self.frees_gradients:
                    alias.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))  # type: ignore[no-untyped-call]
                elif num_batches > 1:  # written to, since pages of calloc are not allocated before
                    alias.grad = torch.empty_like(alias).zero_()
            prepared = self.task.prepare_step(inner, [batch] * num_batches)
            self._loss(inner, prepared[-1]).backward()  # type: ignore[no-untyped-call]

    def _run_sharded(self, batch: Batch, num_batches: int) -> None:
        """Run one microbatch, or two if gradients are accumulated, for which ZeRO has buffers. Collective."""
        model, accelerator = self.model, self.accelerator
        is_zero, before = _is_engine(model), accelerator.sync_gradients
        batches = self.task.prepare_step(model, [batch] * num_batches)[-1 if is_zero else -2 :]
        try:
            for number, microbatch in enumerate(batches):
                accelerator.sync_gradients = number == len(batches) - 1 and not is_zero  # DeepSpeed would take a step
                syncs = nullcontext() if accelerator.sync_gradients else None
                with syncs or accumulate_gradients(accelerator, model, reduces=self.reduces_every_microbatch):
                    accelerator.backward(self._loss(model, microbatch))
        finally:
            accelerator.sync_gradients = before
            if not is_zero:
                self.optimizer.zero_grad()
                for parameter in model.parameters():
                    parameter.grad = None
            elif hasattr(model.optimizer, "micro_step_id"):  # so that the next microbatch overwrites its buffers
                model.optimizer.zero_grad()
            else:
                raise StrategyError(
                    "this version of DeepSpeed stores gradients differently: set train.try_longest_batch: never"
                )

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.before_batch(batch)
        loss_sum: Tensor = self.task.loss_sums(model, batch)["loss_sum"]
        return loss_sum / max(1, batch.num_targets)


@contextmanager
def aliased_parameters(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Temporarily replace each trained parameter by another one with the same storage; tied ones stay tied."""
    aliases: dict[int, nn.Parameter] = {}
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad:
                continue
            if id(parameter) not in aliases:
                aliases[id(parameter)] = nn.Parameter(parameter.detach())
            replaced.append((module._parameters, name, parameter))
    for parameters, name, parameter in replaced:
        parameters[name] = aliases[id(parameter)]
    try:
        yield list(aliases.values())
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter


def _is_engine(model: Any) -> bool:
    return hasattr(model, "zero_optimization_stage")


@contextmanager
def keep_model_state(model: nn.Module) -> Iterator[None]:
    """Restore buffers, plain attributes of modules and running statistics at the end.

    Rotary embeddings that grow with the length (`rope_type: dynamic`) replace their buffer and keep the length reached.
    """
    buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
    plain: list[tuple[nn.Module, str, Any]] = []
    groups: list[tuple[GhostBatchNorm, Any]] = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                buffers.append((module, name, buffer, buffer.clone()))
        plain += [(module, name, value) for name, value in vars(module).items() if type(value) in _PLAIN]
        if isinstance(module, GhostBatchNorm):
            groups.append((module, copy(module.groups)))
    try:
        yield
    finally:
        for module, name, buffer, value in buffers:
            if not buffer.equal(value):
                buffer.copy_(value)
            module._buffers[name] = buffer
        for module, name, own in plain:
            if getattr(module, name, own) is not own:
                setattr(module, name, own)
        for norm, statistics in groups:
            norm.groups = statistics


def missing_state_bytes(optimizer: Any, train: TrainSection) -> int:
    """Return this rank's bytes of optimizer state that the first step will allocate; 0 if it exists."""
    optimizer = _inner(optimizer)
    if any(isinstance(value, Tensor) and value.dim() for state in optimizer.state.values() for value in state.values()):
        return 0
    return _state_bytes(optimizer, train)


def later_host_bytes(optimizer: Any, config: RunConfig, *, strategy: Strategy) -> int:
    """Return the host memory of a run outside its steps, for checkpoints that are written in the background."""
    if not config.checkpoint.asynchronous:
        return LATER_BYTES
    optimizer = _inner(optimizer)
    whole = _state_bytes(optimizer, config.train) + sum(weight.nbytes for weight in _trained(optimizer))
    return LATER_BYTES + (whole if strategy.sharded else whole // strategy.expected.num_processes)


def _state_bytes(optimizer: Any, train: TrainSection) -> int:
    local = _trained(optimizer)
    num_trained = sum(weight.numel() for weight in local)
    state = optimizer_state_bytes(
        train.optimizer.name,
        train.optimizer.state_dtype,
        num_trained=num_trained,
        trained_bytes=sum(weight.nbytes for weight in local),
    )
    return state + (AVERAGE_BYTES * num_trained if train.average else 0)


def _trained(optimizer: Any) -> list[Tensor]:
    return [local_tensor(weight) for group in optimizer.param_groups for weight in group["params"]]


def _inner(optimizer: Any) -> Any:
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def zero_buffer_bytes(model: Any) -> int:
    """Return what ZeRO-1 and -2 allocate in a step: the bucket that is reduced, and this rank's gradient in float32."""
    zero = getattr(model, "optimizer", None) if hasattr(model, "zero_optimization_stage") else None
    if zero is None:
        return 0
    partitions: Sequence[Tensor] = getattr(zero, "single_partition_of_fp32_groups", ())
    bucket: int = getattr(zero, "reduce_bucket_size", 0) * next(model.parameters()).element_size()
    return 2 * bucket + sum(4 * partition.numel() for partition in partitions)
