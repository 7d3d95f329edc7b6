"""From the job and its data to a run with its first weights, into which `restore` loads a checkpoint.

`BUILD_STEPS` lists what is done to the model before and by `Accelerator.prepare`, and why in this order.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.checkpoint.sharding.access import StateAccess
from finetune.config.load import LoadedConfig
from finetune.config.run_config import RunConfig
from finetune.data.batch import Batch
from finetune.memory.state import PredictMemory, predict_memory
from finetune.model.adapters.context import has_adapter
from finetune.model.build import build_model
from finetune.model.layers import output_modules
from finetune.model.size import measure_model
from finetune.model.tensor_parallel import split_layers
from finetune.report.reporter import RunLog
from finetune.report.timing import StartupTimer
from finetune.run.context import RunContext
from finetune.run.setup import accelerator as accelerators
from finetune.run.setup.accelerator import PreparedModel
from finetune.run.setup.model_checks import CheckedJob, Stage, check_model
from finetune.run.setup.model_problems import own_router_coefficient, recorded_parameters
from finetune.run.setup.patches import add_embedding_noise, attended_tokens, flops_per_token, replace_forwards
from finetune.run.setup.precompute import add_frozen_models
from finetune.run.setup.training_data import PreparedData, TrainingData
from finetune.runtime import distributed
from finetune.runtime.optional import lazily, no_op
from finetune.runtime.parallel import tensor_group
from finetune.runtime.progress import Progress
from finetune.runtime.resources import available_bytes, resident_bytes
from finetune.strategy.gradient_sync import Accumulation, GradientReduction, choose_accumulation
from finetune.strategy.protocol import Strategy
from finetune.task.model_inputs import unwrap_model
from finetune.task.protocol import Task
from finetune.task.router_loss import RoutedTask, Router, RoutingRecorder, find_routers
from finetune.train.layer_outputs import RecordedTask
from finetune.train.optim.optimizers import build_optimizer, slow_update_warning
from finetune.train.optim.parameter_groups import (
    describe_groups,
    group_settings,
    list_parameters,
)
from finetune.train.plan import StepPlan
from finetune.train.step import StepTask

with lazily():
    from finetune.model.adapters import lora


@dataclass(frozen=True)
class BuiltRun:
    """The result of `build`: the data with everything precomputed, the plan, and the model with its first weights."""

    training_data: TrainingData
    plan: StepPlan
    prepared: PreparedModel
    step_task: StepTask


@dataclass(frozen=True)
class RestoredRun:
    """The result of `restore`: the run with the weights and states of its checkpoint, if it has one."""

    context: RunContext
    built: BuiltRun
    access: StateAccess  # to the saved state of the model and the optimizer
    fingerprint: RunFingerprint
    progress: Progress


def build(
    context: RunContext,
    data: PreparedData,
    *,
    accelerator: Accelerator,
    startup: StartupTimer,
    on_model: Callable[[], None] = no_op,
) -> BuiltRun:
    """Return the model with the weights that the run starts from, and the data with what they precompute.

    `on_model` is called when the model is prepared. Collective.
    """
    config, training_data = context.config, data.training_data
    prepared = prepare_model(context.loaded, context.strategy, data, accelerator=accelerator, log=context.log)
    job = CheckedJob(context.loaded, context.strategy, data=training_data, prepared=prepared)
    for line in check_model(job, [Stage.PREPARED]):
        context.log(line)
    startup.end("model")
    on_model()
    training_data = add_frozen_models(config, training_data, prepared, log=context.log)
    return BuiltRun(training_data, data.plan, prepared, make_step_task(config, training_data.task, prepared))


@dataclass
class _Draft:
    """A model on its way from the job to what Accelerate prepares: what the steps are given and what they made."""

    loaded: LoadedConfig
    strategy: Strategy
    data: PreparedData
    accelerator: Accelerator
    log: RunLog
    plan: StepPlan | None  # None: nothing is trained
    process_bytes: int = 0  # before the model was loaded, on a CPU
    model: Any = None  # as it was built, then as Accelerate prepared it
    unwrapped_model: Any = None
    optimizer: Any = None
    before_batch: Callable[[Batch], None] = no_op
    reduces_every_microbatch: bool = False
    memory: PredictMemory | None = None  # of this rank, if it trains
    routers: tuple[Router, ...] = ()
    flops_per_token: float | None = None
    parameter_groups: Mapping[str, str] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        """Return the job's sections."""
        return self.loaded.config


def prepare_model(
    loaded: LoadedConfig,
    strategy: Strategy,
    data: PreparedData,
    *,
    accelerator: Accelerator,
    log: RunLog,
    trains: bool = True,
) -> PreparedModel:
    """Return the prepared model and optimizer, checked to be what was launched. Collective."""
    draft = _Draft(loaded, strategy, data, accelerator, log, data.plan if trains else None)
    for step, _ in BUILD_STEPS:
        step(draft)
    return PreparedModel(
        accelerator,
        draft.unwrapped_model,
        draft.model,
        draft.optimizer,
        draft.before_batch,
        reduces_every_microbatch=draft.reduces_every_microbatch,
        memory=draft.memory,
        routers=draft.routers,
        flops_per_token=draft.flops_per_token,
        parameter_groups=draft.parameter_groups,
    )


def _measure_process(draft: _Draft) -> None:
    draft.process_bytes = 0 if torch.cuda.is_available() else resident_bytes()  # what `mem` of a step measures


def _load(draft: _Draft) -> None:
    config, training_data = draft.config, draft.data.training_data
    draft.model = draft.unwrapped_model = build_model(
        config.model,
        head=training_data.task.head,
        head_values=training_data.task.head_values,
        tokenizer=training_data.tokenizer,
        seed=config.run.seed,
        init_context=draft.strategy.init_context(draft.accelerator.device),
        recorded=recorded_parameters(config),
    )
    distributed.barrier()  # the first collective over tensors begins when the slowest rank has its weights


def _check(draft: _Draft) -> None:
    job = CheckedJob(draft.loaded, draft.strategy, data=draft.data.training_data, unwrapped_model=draft.unwrapped_model)
    for line in check_model(job, [Stage.MODEL]):
        draft.log(line)


def _split_layers(draft: _Draft) -> None:
    if draft.strategy.expected.tensor_size > 1:
        draft.log(split_layers(unwrap_model(draft.unwrapped_model), tensor_group()))


def _plan_memory(draft: _Draft) -> None:
    """Log the model's size and the memory that a rank needs; decide how it accumulates gradients. Collective."""
    config, plan, size = draft.config, draft.plan, measure_model(draft.unwrapped_model)
    predict = partial(
        predict_memory,
        config,
        draft.strategy,
        size=size,
        process_bytes=draft.process_bytes,
    )
    accumulation = plan_accumulation(
        config,
        draft.strategy,
        device=draft.accelerator.device,
        num_trained=size.num_trained,
        num_batches=plan.num_batches if plan else 1,
        planned_bytes=predict()(plan).state_bytes,
        log=draft.log,
    )
    draft.reduces_every_microbatch = accumulation.reduces_every_microbatch
    memory = predict(unsharded_gradient_bytes=accumulation.unsharded_gradient_bytes)
    draft.memory = memory if plan else None
    is_adapted = has_adapter(draft.unwrapped_model)
    for line in (*size.lines, lora.adapter_summary(draft.unwrapped_model) if is_adapted else None):
        if line is not None:
            draft.log(line)
    if plan is None or config.train.microbatch_size != "auto":
        draft.log(memory(plan).line)


def _make_optimizer(draft: _Draft) -> None:
    train, named = draft.config.train, list_parameters(draft.unwrapped_model)
    draft.optimizer = build_optimizer(
        named,
        train.optimizer,
        learning_rate=draft.data.plan.schedule.peak,
        unfreeze=train.unfreeze,
        average=train.average,
        seed=draft.config.run.seed,
    )
    draft.parameter_groups = group_settings(draft.optimizer.param_groups, named)
    for line in (*describe_groups(draft.optimizer.param_groups, named), slow_update_warning(draft.optimizer)):
        if line is not None:
            draft.log(line)


def _replace_forwards(draft: _Draft) -> None:
    model, config = draft.unwrapped_model, draft.config
    if alpha := config.train.embedding_noise:
        draft.before_batch = add_embedding_noise(model, alpha=alpha)
    replace_forwards(
        unwrap_model(model),
        config,
        draft.strategy,
        draft.data.training_data.training,
        draft.plan,
        device=draft.accelerator.device,
        log=draft.log,
    )


def _read_layers(draft: _Draft) -> None:
    config = draft.config
    if config.train.router_aux_loss is not None or config.report.expert_load:
        draft.routers = find_routers(unwrap_model(draft.unwrapped_model))
    if draft.plan is not None:
        attended = attended_tokens(draft.data.training_data.training, draft.plan)
        draft.flops_per_token = flops_per_token(unwrap_model(draft.unwrapped_model), attended=attended)


def _prepare(draft: _Draft) -> None:
    draft.model, draft.optimizer = accelerators.prepare_model_and_optimizer(
        draft.config,
        draft.strategy,
        accelerator=draft.accelerator,
        model=draft.unwrapped_model,
        optimizer=draft.optimizer,
    )


BUILD_STEPS: tuple[tuple[Callable[[_Draft], None], str], ...] = (
    (_measure_process, "before the model is in memory: the memory of a step counts what the process adds to this"),
    (_load, "all that follows reads the modules; every rank has its weights before the first collective over tensors"),
    (_check, "what cannot be trained is refused before anything is changed or planned"),
    (_split_layers, "sizes and the optimizer belong to a rank's part"),
    (_plan_memory, "what is free now, next to the weights alone, decides how gradients are accumulated"),
    (_make_optimizer, "of the parameters under the names that the job's patterns are about"),
    (
        _replace_forwards,
        "before a strategy wraps or shards the model: it then contains the fused and compiled layers",
    ),
    (_read_layers, "as long as every parameter is whole and under its own name"),
    (_prepare, "last: the Accelerator wraps, shards and moves what was built"),
)
"""How a model is built, in order, with the reason for the place of each step."""


def make_step_task(config: RunConfig, task: Task, prepared: PreparedModel) -> StepTask:
    """Return the task, or with it what `train.router_aux_loss` adds to its loss and `report.expert_load` to the log."""
    step_task: StepTask = task
    inner = unwrap_model(prepared.unwrapped_model)
    if prepared.routers:
        written = config.train.router_aux_loss
        coefficient = own_router_coefficient(inner.config) if isinstance(written, str) else written
        recorder = RoutingRecorder(inner, prepared.routers)
        step_task = RoutedTask(task, recorder, coefficient, prepared.before_batch)
    return RecordedTask(step_task, inner, output_modules(inner)) if config.run.record_layers else step_task


GRADIENT_BYTES = 4
"""Bytes per trained parameter of a gradient that is accumulated before it is reduced: float32."""


def plan_accumulation(
    config: RunConfig,
    strategy: Strategy,
    *,
    device: torch.device,
    num_trained: int,
    num_batches: int,
    planned_bytes: int,
    log: RunLog,
) -> Accumulation:
    """Return how the gradients of `num_batches` microbatches are accumulated, and log why. Collective.

    `planned_bytes` is what weights, gradients and optimizer state will take on each rank. All ranks decide by the one
    with the least memory.
    """
    reduction = strategy.reduction
    free_bytes = 0
    if reduction is GradientReduction.EITHER and num_batches > 1:
        free_bytes = min(distributed.gather_objects(free_device_bytes(device))) - planned_bytes
    accumulation = choose_accumulation(
        reduction,
        num_batches=num_batches,
        num_processes=strategy.expected.num_processes,
        unsharded_bytes=GRADIENT_BYTES * num_trained,
        free_bytes=free_bytes,
        is_deterministic=config.run.deterministic,
        has_bf16_shards=config.train.optimizer.stochastic_rounding,
    )
    if accumulation.reason is not None and config.train.microbatch_size != "auto":
        log(accumulation.reason)
    return accumulation


def free_device_bytes(device: torch.device) -> int:
    """Return the bytes that this rank can still allocate on its device; 0 where the device does not report it."""
    if device.type == "cpu":
        return available_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    module = torch.get_device_module(device)
    return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else 0
