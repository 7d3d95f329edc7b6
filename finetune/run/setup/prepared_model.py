"""The model and optimizer that the Accelerator prepared, and all that was learned about them meanwhile."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import nn

from finetune.checkpoint.sharding.access import build_access
from finetune.config.rules.model import compile_fits_the_model
from finetune.config.rules.train import router_loss_fits_the_model
from finetune.config.run_config import RunConfig
from finetune.config.sections.model import ModelSection
from finetune.config.sections.train import Fp8Section, TrainSection
from finetune.data.batch import Batch
from finetune.data.order.order import DatasetView
from finetune.errors import UserError
from finetune.memory.state import PredictMemory, predict_memory
from finetune.model.kernels import float8, fused_layers
from finetune.model.kernels.compilation import (
    CompilationEstimate,
    compile_model,
    estimate_compilation,
    repeated_layers,
    why_not_compilable,
)
from finetune.model.processing import check_image_shape
from finetune.model.size import measure_model, read_shapes
from finetune.model.tensor_parallel import split_layers
from finetune.report.reporter import RunLog
from finetune.run.flops import attended_tokens, flops_per_token, tokens_per_position
from finetune.run.setup import accelerator as accelerators
from finetune.run.setup.data import TrainingData
from finetune.run.setup.model import (
    adapter_summary_of,
    build_model,
    model_warnings,
    recorded_parameters,
    router_coefficient,
)
from finetune.run.setup.strategy import require_tied_weights_supported
from finetune.runtime import distributed
from finetune.runtime.gpus import GpuModel, find_gpu
from finetune.runtime.optional import no_op
from finetune.runtime.parallel import tensor_group
from finetune.runtime.resources import available_bytes, resident_bytes
from finetune.strategy.gradient_sync import Accumulation, GradientReduction, choose_accumulation
from finetune.strategy.protocol import Strategy
from finetune.task.lm_loss.target_loss import fallback_warning, resolve_kernel
from finetune.task.model_inputs import unwrap_model
from finetune.task.protocol import Task
from finetune.task.router_loss import RoutedTask, Router, RoutingRecorder, find_routers
from finetune.train.evaluate import AveragedWeights, EvaluationWeights, TrainedWeights, average_formula
from finetune.train.neftune import EmbeddingNoise
from finetune.train.optim.optimizers import build_optimizer, slow_update_warning
from finetune.train.optim.parameter_groups import NamedParameter, describe_groups, list_parameters
from finetune.train.parts import StepTask
from finetune.train.plan import StepPlan


@dataclass(frozen=True)
class PreparedModel:
    """What `Accelerator.prepare` gave back. `unwrapped_model` is as it was built, its parameters may be sharded."""

    accelerator: Accelerator
    unwrapped_model: Any
    model: Any
    optimizer: Any
    before_batch: Callable[[Batch], None] = no_op  # called with each batch before its forward pass
    reduces_every_microbatch: bool = False
    memory: PredictMemory | None = None  # of this rank, where it trains
    routers: tuple[Router, ...] = ()  # where a key of the job is about them
    flops_per_token: float | None = None


@dataclass(frozen=True)
class BuiltRun:
    """What `build` returns: the data with everything precomputed, the plan, and the model with its first weights."""

    training_data: TrainingData
    plan: StepPlan
    prepared: PreparedModel
    step_task: StepTask


def prepare_model(
    config: RunConfig,
    strategy: Strategy,
    training_data: TrainingData,
    *,
    accelerator: Accelerator,
    learning_rate: float,
    log: RunLog,
    plan: StepPlan | None = None,
) -> PreparedModel:
    """Return the prepared model and optimizer, checked to be what was launched. Collective.

    Without a plan, nothing is going to be trained.
    """
    process_bytes = 0 if torch.cuda.is_available() else resident_bytes()  # what `mem` of a step measures
    unwrapped: Any = build_model(
        config,
        task=training_data.task,
        tokenizer=training_data.tokenizer,
        init_context=strategy.init_context(accelerator.device),
        recorded=recorded_parameters(config),
    )
    distributed.barrier()  # the first collective over tensors begins when the slowest rank has its weights
    check_image_shape(unwrapped.config, training_data.processing.processor)
    require_tied_weights_supported(unwrapped, strategy.name)
    if strategy.expected().tensor_size > 1:
        log(split_layers(unwrap_model(unwrapped), tensor_group()))
    accumulation, memory = _log_size(
        config, strategy, unwrapped, accelerator=accelerator, plan=plan, process_bytes=process_bytes, log=log
    )
    for warning in model_warnings(config, unwrapped):
        log(warning)
    optimizer = make_optimizer(config, list_parameters(unwrapped), learning_rate=learning_rate, log=log)
    noise = config.train.embedding_noise
    before_batch = EmbeddingNoise(unwrapped, alpha=noise).set_batch if noise else no_op
    _replace_forwards(
        unwrap_model(unwrapped), config, strategy, training_data.training, plan, device=accelerator.device, log=log
    )
    routers = _find_routers(config, unwrapped, log=log)
    flops = None
    if plan is not None:
        flops = flops_per_token(unwrap_model(unwrapped), attended=attended_tokens(training_data.training, plan))
    model, prepared_optimizer = accelerators.prepare(
        config, strategy, accelerator=accelerator, model=unwrapped, optimizer=optimizer
    )
    kernel, _ = resolve_kernel(config.train.loss_kernel)
    if (fallback := fallback_warning(model, training_data.task.head, kernel)) is not None:
        log(fallback)
    return PreparedModel(
        accelerator,
        unwrapped,
        model,
        prepared_optimizer,
        before_batch,
        reduces_every_microbatch=accumulation.reduces_every_microbatch,
        memory=memory,
        routers=routers,
        flops_per_token=flops,
    )


def _log_size(
    config: RunConfig,
    strategy: Strategy,
    model: nn.Module,
    *,
    accelerator: Accelerator,
    plan: StepPlan | None,
    process_bytes: int,
    log: RunLog,
) -> tuple[Accumulation, PredictMemory | None]:
    """Log the model's size and the memory that a rank needs; return how it accumulates gradients. Collective.

    With `train.microbatch_size: auto`, the memory is logged once the size is known.
    """
    size = measure_model(model)
    predict = partial(predict_memory, config, strategy, size=size, process_bytes=process_bytes, accelerator=accelerator)
    accumulation = plan_accumulation(
        config,
        strategy,
        device=accelerator.device,
        num_trained=size.num_trained,
        num_batches=plan.num_batches if plan else 1,
        planned_bytes=predict()(plan).state_bytes,
        log=log,
    )
    memory = predict(unsharded_gradient_bytes=accumulation.unsharded_gradient_bytes)
    for line in (*size.lines, *adapter_summary_of(model)):
        log(line)
    if plan is None or config.train.microbatch_size != "auto":
        log(memory(plan).line)
    return accumulation, memory if plan else None


def _replace_forwards(
    model: Any,
    config: RunConfig,
    strategy: Strategy,
    training: DatasetView,
    plan: StepPlan | None,
    *,
    device: torch.device,
    log: RunLog,
) -> None:
    """Fuse layers, convert them to 8-bit products and compile them, as the job says; raises UserError if impossible."""
    if strategy.expected().tensor_size > 1:
        return  # the config's rules refuse keys that would replace a forward pass
    compiled = _chosen_compilation(config, model, strategy, training, plan, log=log)
    _fuse_layers(model, config.model, compiled=compiled, device_type=device.type, log=log)
    _convert_to_float8(model, config.train, device=device, log=log)
    _compile(model, compiled, strategy=strategy, log=log)


def _convert_to_float8(model: Any, train: TrainSection, *, device: torch.device, log: RunLog) -> None:
    """Make linear layers multiply in 8 bits where the job says so; raises UserError where the device cannot."""
    if train.precision != "fp8":
        return
    section = train.fp8 or Fp8Section()
    if (missing := float8.missing_requirement(device, section)) is not None:
        raise UserError(f"train.precision: `fp8` needs {missing}. Write `bf16`.")
    count = float8.convert_linear_layers(model, section)
    if not count:
        raise UserError(
            f"train.precision: `fp8` finds no linear layer in the body of `{model.config.model_type}` whose sides are "
            "multiples of 16. Write `bf16`."
        )
    emulated = ", emulated" if section.emulate else ""
    log(f"fp8: {count} linear layers multiply in 8 bits while they train ({section.recipe}{emulated})")


def _chosen_compilation(
    config: RunConfig, model: Any, strategy: Strategy, training: DatasetView, plan: StepPlan | None, *, log: RunLog
) -> Literal["off", "regional", "full"]:
    """Return the job's choice, or for `auto` the faster one, which is logged; each rank estimates for its own GPU."""
    if config.model.compile != "auto":
        return config.model.compile
    if plan is None:
        return "off"
    gpu = find_gpu(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    estimate = None if gpu is None else _estimate(config, model, training, plan, gpu=gpu)
    reason = _why_not_compiled(config, strategy, plan, has_gpu=torch.cuda.is_available())
    if reason is None and estimate is None:
        reason = "the GPU is not in the table, or the model's shapes are not known"
    mode: Literal["off", "regional"] = (
        "regional" if reason is None and estimate is not None and estimate.pays else "off"
    )
    log(f"model.compile: auto: {mode}, since {reason or f'in {plan.num_steps:,} steps {estimate}'}")
    return mode


def _why_not_compiled(config: RunConfig, strategy: Strategy, plan: StepPlan, *, has_gpu: bool) -> str | None:
    """Return why `model.compile: auto` compiles nothing in this run, however long it is; None if it may."""
    if not has_gpu:
        return "this run has no GPU"
    if strategy.name == "zero3" or plan.sequence_size > 1:
        return f"{strategy.name if plan.sequence_size == 1 else 'splitting rows over ranks'} breaks the compiled graph"
    compiled = config.model_copy(update={"model": config.model.model_copy(update={"compile": "regional"})})
    problems = [*compile_fits_the_model(compiled), *router_loss_fits_the_model(compiled)]
    if problems:
        return f"of another key: {problems[0].key}: {problems[0].message}"
    is_wanted = fused_layers.are_wanted(config.model, compiled="off")
    if is_wanted and (config.model.kernels == "liger" or fused_layers.missing_requirement("cuda") is None):
        return "the kernels of liger-kernel fuse the same layers (`model.kernels`)"
    return why_not_compilable()


def _estimate(
    config: RunConfig, model: Any, training: DatasetView, plan: StepPlan, *, gpu: GpuModel
) -> CompilationEstimate | None:
    """Return what compiling takes and saves in the whole run; None for a model whose shapes are not known."""
    shapes = read_shapes(model.config)
    if shapes is None:
        return None
    tokens = tokens_per_position(training, plan)
    return estimate_compilation(
        shapes,
        gpu,
        num_tokens=plan.num_steps * plan.global_batch_size * tokens / plan.world,
        item_bytes=4 if config.train.precision == "fp32" else 2,
        recomputes=bool(config.model.gradient_checkpointing),
        num_kinds=len({type(layer) for layer in repeated_layers(model)}),
    )


def _fuse_layers(model: Any, section: ModelSection, *, compiled: str, device_type: str, log: RunLog) -> None:
    """Use the fused kernels that the job names, and log where; raises UserError if there are none to use."""
    is_required, missing = section.kernels == "liger", fused_layers.missing_requirement(device_type)
    if is_required and missing is not None:
        raise UserError(f"model.kernels: `liger` needs {missing}. Write `auto`, or remove the key.")
    if not fused_layers.are_wanted(section, compiled=compiled):
        return
    if missing is not None:
        if device_type == "cuda":
            log(f"warning: model.kernels: no fused kernels are used, which need {missing}")
        return
    counts = fused_layers.fuse_layers(model, fuses_rotary=section.gradient_checkpointing != "selective")
    if counts:
        log(f"kernels of liger-kernel: {', '.join(f'{name} ({count})' for name, count in counts.items())}")
    elif is_required:
        raise UserError(
            f"model.kernels: no layer of `{model.config.model_type}` computes what a kernel of liger-kernel computes. "
            "Write `auto`, or remove the key."
        )


def _compile(model: Any, mode: Literal["off", "regional", "full"], *, strategy: Strategy, log: RunLog) -> None:
    """Compile as the job says, before a strategy wraps or shards the model; ZeRO-3 warns that nothing is compiled."""
    if mode == "off":
        return
    if strategy.name == "zero3":
        log(
            f"warning: model.compile: {mode} has no effect under ZeRO-3, which gathers parameters in hooks of every "
            "module, and each of them breaks the compiled graph. To compile, launch with fsdp2.yaml."
        )
        return
    compile_model(model, mode, log=log)


def _find_routers(config: RunConfig, unwrapped: Any, *, log: RunLog) -> tuple[Router, ...]:
    """Return the routers where a key is about them, before FSDP1 flattens their weights; log if they are frozen."""
    if config.train.router_aux_loss is None and not config.report.expert_load:
        return ()
    inner = unwrap_model(unwrapped)
    routers = find_routers(inner)
    prefixes = tuple(f"{_without_wrappers(router.name)}." for router in routers)
    trained = [_without_wrappers(name) for name, weight in inner.named_parameters() if weight.requires_grad]
    if config.train.router_aux_loss is not None and not any(name.startswith(prefixes) for name in trained):
        log(
            "train.router_aux_loss: the routers are frozen; the balance loss trains the layers below them, on whose "
            "output their choice depends"
        )
    return routers


def _without_wrappers(name: str) -> str:
    """Return the name without the parts that adapters insert; their parameters are siblings of the base."""
    return name.replace(".base_layer", "")


def make_step_task(config: RunConfig, task: Task, prepared: PreparedModel) -> StepTask:
    """Return the task, or with it what `train.router_aux_loss` adds to its loss and `report.expert_load` to the log."""
    if not prepared.routers:
        return task
    inner = unwrap_model(prepared.unwrapped_model)
    recorder = RoutingRecorder(inner, prepared.routers)
    coefficient = router_coefficient(config.train.router_aux_loss, inner.config)
    return RoutedTask(task, recorder, coefficient, prepared.before_batch)


def make_weights(train: TrainSection, prepared: PreparedModel) -> EvaluationWeights:
    """Return the weights to evaluate and export: the average where the optimizer keeps one, else the trained."""
    average = average_formula(train)
    if average is None:
        return TrainedWeights()
    key, formula = average
    return AveragedWeights(build_access(prepared.accelerator, prepared.model, prepared.optimizer), key, formula)


GRADIENT_BYTES = 4
"""Bytes per trained parameter of a gradient that is accumulated before it is reduced: float32."""


def make_optimizer(
    config: RunConfig, named: list[NamedParameter], *, learning_rate: float, log: RunLog
) -> torch.optim.Optimizer:
    """Return the optimizer of these parameters, not yet prepared; its parameter groups are logged."""
    train = config.train
    optimizer = build_optimizer(
        named,
        train.optimizer,
        learning_rate=learning_rate,
        unfreeze=train.unfreeze,
        average=train.average,
        seed=config.run.seed,
    )
    for line in describe_groups(optimizer.param_groups, named):
        log(line)
    if (warning := slow_update_warning(optimizer)) is not None:
        log(warning)
    return optimizer


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
    reduction = strategy.reduction()
    free_bytes = 0
    if reduction is GradientReduction.EITHER and num_batches > 1:
        free_bytes = min(distributed.gather_objects(free_device_bytes(device))) - planned_bytes
    accumulation = choose_accumulation(
        reduction,
        num_batches=num_batches,
        num_processes=strategy.expected().num_processes,
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
