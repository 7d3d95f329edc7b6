"""One batch forward and backward, as in a step with optimizer state, after which everything is as it was.

Where every rank has whole parameters (one process, DDP, ZeRO-1 and -2) the model inside the wrappers is run, with
aliases in place of its trained parameters: gradients go to the aliases, so that neither DDP's buckets nor ZeRO's hooks
see them, and what a task asks of other ranks is answered by this rank alone. Nothing is sent, hence nothing can wait.

Where parameters are sharded (FSDP, ZeRO-3) each layer is gathered, so the real model is run and its gradients are
dropped. A rank that is out of memory there ends the run; see `choose.py` for why `auto` does not come to that.
"""

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from finetune.data.batch import Batch
from finetune.errors import StrategyError
from finetune.run.setup.microbatch.limits import MemoryLimit, is_out_of_memory
from finetune.run.setup.microbatch.model_state import keep_model_state
from finetune.run.setup.microbatch.not_yet_allocated import local_tensor
from finetune.run.setup.prepared_model import PreparedModel
from finetune.runtime import distributed
from finetune.runtime.seeds import keep_random_state
from finetune.strategy.gradient_sync import accumulate_gradients
from finetune.train.meters import keep_peak_memory
from finetune.train.parts import StepTask


@dataclass(frozen=True)
class Trial:
    """What a trial runs."""

    prepared: PreparedModel
    task: StepTask
    is_sharded: bool  # the parameters are
    frees_gradients: bool  # in the backward pass, as soon as each is computed
    extra_bytes: int  # that a step has beside, and that is not there yet: optimizer state, buffers of ZeRO

    @property
    def gradient_bytes(self) -> int:
        """Return what this rank's gradients take where they are accumulated over microbatches."""
        if self.frees_gradients or _is_engine(self.prepared.model):
            return 0
        trained = (each for each in self.prepared.model.parameters() if each.requires_grad)
        return sum(local_tensor(each).nbytes for each in trained)

    def peaks(self, batch: Batch, *, num_batches: int, memories: tuple[MemoryLimit, ...]) -> tuple[int, ...] | None:
        """Return the peak of each kind of memory on this rank; None where it was out of memory.

        `num_batches` is the number of microbatches of a step, all of which the task may look at. Under a strategy that
        shards parameters it is collective.
        """
        model, device = self.prepared.unwrapped_model, self.prepared.accelerator.device
        try:
            with keep_peak_memory(), keep_model_state(model), _keep_all_random_state(), _eager():
                measurements = [memory.start() for memory in memories]
                extra = torch.empty(self.extra_bytes, dtype=torch.uint8, device=device).fill_(0)
                self._run(batch.to(device), num_batches)
                del extra
                return tuple(measured() for measured in measurements)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        finally:
            _collect(device)
        return None

    def _run(self, batch: Batch, num_batches: int) -> None:
        if self.is_sharded:
            self._run_sharded(batch, num_batches)
        else:
            self._run_alone(batch, num_batches)

    def _run_alone(self, batch: Batch, num_batches: int) -> None:
        inner = _without_wrapper(self.prepared.model)
        with aliased_parameters(inner) as aliases, distributed.local_collectives():
            for alias in aliases:
                if self.frees_gradients:
                    alias.register_post_accumulate_grad_hook(_free)  # type: ignore[no-untyped-call]
                elif num_batches > 1:
                    alias.grad = torch.empty_like(alias).zero_()  # touched: calloc would give pages that are not there
            prepared = self.task.prepare_step(inner, [batch] * num_batches)
            self._loss(inner, prepared[-1]).backward()  # type: ignore[no-untyped-call]

    def _run_sharded(self, batch: Batch, num_batches: int) -> None:
        """Run one microbatch, or two where gradients are accumulated, which ZeRO has buffers for. Collective."""
        prepared, accelerator = self.prepared, self.prepared.accelerator
        model, is_zero, before = prepared.model, _is_engine(prepared.model), accelerator.sync_gradients
        batches = self.task.prepare_step(model, [batch] * num_batches)[-1 if is_zero else -2 :]
        try:
            for number, each in enumerate(batches):
                accelerator.sync_gradients = number == len(batches) - 1 and not is_zero  # DeepSpeed would step there
                reduces = prepared.reduces_every_microbatch
                syncs = nullcontext() if accelerator.sync_gradients else None
                with syncs or accumulate_gradients(accelerator, model, reduces=reduces):
                    accelerator.backward(self._loss(model, each))
        finally:
            accelerator.sync_gradients = before
            _drop_gradients(model, prepared.optimizer)

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.prepared.before_batch(batch)
        loss_sum: Tensor = self.task.loss_sums(model, batch)["loss_sum"]
        return loss_sum / max(1, batch.num_targets)


@contextmanager
def aliased_parameters(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Put another parameter over the same numbers in the place of each trained one, and back; tied ones stay tied."""
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


def _without_wrapper(model: Any) -> nn.Module:
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) or _is_engine(model) else model
    return inner


def _is_engine(model: Any) -> bool:
    return hasattr(model, "zero_optimization_stage")


def _free(parameter: Tensor) -> None:
    parameter.grad = None


def _drop_gradients(model: Any, optimizer: Any) -> None:
    """Leave no gradient, as after a step; under ZeRO the next microbatch then replaces what its buffers hold."""
    if _is_engine(model):
        zero = model.optimizer
        if not hasattr(zero, "micro_step_id"):
            raise StrategyError("this DeepSpeed keeps gradients otherwise: set train.try_longest_batch: never")
        zero.zero_grad()
        return
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = None


@contextmanager
def _keep_all_random_state() -> Iterator[None]:
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with keep_random_state():
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextmanager
def _eager() -> Iterator[None]:
    """Compile nothing meanwhile: for which shapes code is compiled depends on which comes first."""
    with ExitStack() as stack:
        stance: Callable[[str], Any] | None = getattr(torch.compiler, "set_stance", None)
        if stance is not None:
            stack.enter_context(stance("force_eager"))
        yield


def _collect(device: torch.device) -> None:
    """Free what an exception may still refer to, and hand unused blocks of a GPU back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
