"""The Accelerator, and the model and optimizer that it prepared."""

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune.checkpoint.sharding.access import build_access
from finetune.config.rules.model import adapter_of
from finetune.config.run_config import RunConfig
from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.errors import ModelError
from finetune.memory.state import PredictMemory, predict_memory
from finetune.model.attention.implementation import check_isolation, require_position_ids
from finetune.model.attention.padding import check_padding, randomness
from finetune.model.attention.supported_models import carries_state, has_sinks
from finetune.model.attention.varlen_kernels import missing_kernel_warning
from finetune.model.compilation import compile_model
from finetune.model.loading.pretrained import base_mismatch_warning
from finetune.model.positions.limits import positions_of
from finetune.model.processing import check_image_shape
from finetune.model.size import measure_model, precision_warnings
from finetune.model.upstream import expose_hidden_size, head_as_one_unit
from finetune.registry.tasks import TASKS, ModelHead
from finetune.run.context import RunContext
from finetune.run.flops import model_flops
from finetune.run.setup.accumulation import plan_accumulation
from finetune.run.setup.data import TrainingData
from finetune.run.setup.model import adapter_summary_of, build_model, recorded_parameters, router_coefficient
from finetune.run.setup.padding_free import resolve_padding_free
from finetune.run.setup.strategy import require_tied_weights_supported
from finetune.run.setup.tf32 import set_tf32
from finetune.runtime import distributed, seeds
from finetune.runtime.resources import resident_bytes
from finetune.runtime.upstream import bound_primitive_cache
from finetune.strategy.experts import keep_experts_in_graph, set_zero3_leaf_modules
from finetune.strategy.gradient_sync import Accumulation
from finetune.strategy.upstream import (
    broadcast_rank_0_buffers,
    drop_not_yet_unfrozen_from_zero_norm,
    keep_bf16_parameters,
    keep_ddp_buffers_local,
    prefetch_fsdp2_layers,
    reduce_zero_buckets_in_place,
    set_zero_bucket_sizes,
    widen_unfilled_parameters,
)
from finetune.task.lm_loss.fallback import fallback_warning
from finetune.task.lm_loss.target_loss import resolve_kernel
from finetune.task.model_inputs import collate_row, forward_logits, is_padding_free, unwrap_model
from finetune.task.pooling import sample_logits
from finetune.task.protocol import Task
from finetune.task.router_loss.loss import RoutedTask
from finetune.task.router_loss.recorder import RoutingRecorder
from finetune.task.router_loss.routers import Router, find_routers
from finetune.train.accelerator import build_accelerator, check_prepared
from finetune.train.evaluate import AveragedWeights, EvaluationWeights, TrainedWeights, average_formula
from finetune.train.neftune import EmbeddingNoise
from finetune.train.optim.optimizers import build_optimizer, slow_update_warning
from finetune.train.optim.parameter_groups import NamedParameter, describe_groups, list_parameters
from finetune.train.parts import StepTask, no_op
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


def make_accelerator(context: RunContext) -> Accelerator:
    """Return the Accelerator of the launched strategy; from here on ranks can communicate. Collective."""
    config = context.config
    bound_primitive_cache(os.environ)
    if config.run.deterministic:
        seeds.use_deterministic_kernels()
    timeout = distributed.group_timeout(config.run.hang_after_seconds)
    accelerator = build_accelerator(context.strategy, precision=config.train.precision, timeout=timeout)
    for line in set_tf32(
        None if config.train.tf32 == "auto" else config.train.tf32,
        accelerator.device,
        is_deterministic=config.run.deterministic,
        is_float32=config.train.precision == "fp32",
    ):
        context.log(line)
    return accelerator


def prepare_model(
    context: RunContext,
    training_data: TrainingData,
    *,
    accelerator: Accelerator,
    learning_rate: float,
    plan: StepPlan | None = None,
) -> PreparedModel:
    """Return the prepared model and optimizer, checked to be what was launched. Collective.

    Without a plan, nothing is going to be trained.
    """
    config, strategy, log = context.config, context.strategy, context.log
    process_bytes = 0 if torch.cuda.is_available() else resident_bytes()  # what `mem` of a step measures
    plain = _build_plain(context, training_data, device=accelerator.device)
    distributed.barrier()  # the first collective over tensors begins when the slowest rank has its weights
    check_image_shape(plain.config, training_data.processing.processor)
    require_tied_weights_supported(plain, strategy.name)
    accumulation, memory = _log_size(context, plain, accelerator, plan=plan, process_bytes=process_bytes)
    _warn(context, plain)
    optimizer = _optimizer(context, list_parameters(plain), learning_rate=learning_rate)
    noise = config.train.embedding_noise
    before_batch = EmbeddingNoise(plain, alpha=noise).set_batch if noise else no_op
    _compile(context, unwrap_model(plain))
    routers = _routers(context, plain)
    flops = model_flops(plain, training_data.training, plan) if plan else None
    model, prepared = _prepare(context, accelerator, plain, optimizer)
    kernel, _ = resolve_kernel(config.train.loss_kernel)
    if (warning := fallback_warning(model, training_data.task.head, kernel)) is not None:
        log(warning)
    if config.train.unfreeze:
        drop_not_yet_unfrozen_from_zero_norm(model)
    every = accumulation.reduces_every_microbatch
    return PreparedModel(accelerator, plain, model, prepared, before_batch, every, memory, routers, flops)


def _build_plain(context: RunContext, training_data: TrainingData, *, device: torch.device) -> Any:
    """Return the model before it is prepared. Collective."""
    return build_model(
        context.config,
        task=training_data.task,
        tokenizer=training_data.tokenizer,
        init_context=context.strategy.init_context(device),
        recorded=recorded_parameters(context.config),
    )


def _prepare(
    context: RunContext, accelerator: Accelerator, plain: Any, optimizer: torch.optim.Optimizer
) -> tuple[Any, Any]:
    """Return model and optimizer as Accelerate prepares them, checked to be what was launched. Collective."""
    config, strategy = context.config, context.strategy
    with (
        expose_hidden_size(plain.config),
        head_as_one_unit(unwrap_model(plain)),
        broadcast_rank_0_buffers(accelerator, plain),
        keep_bf16_parameters(accelerator, is_wanted=config.train.optimizer.stochastic_rounding),
    ):
        set_zero_bucket_sizes(accelerator, plain)
        reduce_zero_buckets_in_place(accelerator)
        keep_experts_in_graph(plain)
        set_zero3_leaf_modules(accelerator, plain)
        if strategy.init_context(accelerator.device).on_meta_device and config.model.quantization is None:
            widen_unfilled_parameters(accelerator, plain)
        model, prepared = accelerator.prepare(plain, optimizer)
    check_prepared(model, strategy.expected(), strategy=strategy.name)
    prefetch_fsdp2_layers(accelerator, model)
    keep_ddp_buffers_local(model)
    return model, prepared


def _log_size(
    context: RunContext,
    model: nn.Module,
    accelerator: Accelerator,
    *,
    plan: StepPlan | None,
    process_bytes: int,
) -> tuple[Accumulation, PredictMemory | None]:
    """Log the model's size and the memory that a rank needs; return how it accumulates gradients. Collective.

    What it needs with `train.microbatch_size: auto` is logged when that is known.
    """
    size = measure_model(model)
    predict = partial(
        predict_memory,
        context.config,
        context.strategy,
        size=size,
        process_bytes=process_bytes,
        accelerator=accelerator,
    )
    accumulation = plan_accumulation(
        context,
        accelerator.device,
        num_trained=size.num_trained,
        num_batches=plan.num_batches if plan else 1,
        planned_bytes=predict()(plan).state_bytes,
    )
    memory = predict(unsharded_gradient_bytes=accumulation.unsharded_gradient_bytes)
    for line in (*size.lines, *adapter_summary_of(model)):
        context.log(line)
    if plan is None or context.config.train.microbatch_size != "auto":
        context.log(memory(plan).line)
    return accumulation, memory if plan else None


def _compile(context: RunContext, model: Any) -> None:
    """Compile what the job names, before a strategy wraps or shards it; under ZeRO-3 warn that nothing is compiled."""
    wanted = context.config.model.compile
    if wanted == "off":
        return
    if context.strategy.name == "zero3":
        context.log(
            f"warning: model.compile: {wanted} has no effect under ZeRO-3, which gathers parameters in hooks of every "
            "module, and each of them breaks the compiled graph. To compile, launch with fsdp2.yaml."
        )
        return
    compile_model(model, wanted, log=context.log)


def _optimizer(context: RunContext, named: list[NamedParameter], *, learning_rate: float) -> torch.optim.Optimizer:
    train = context.config.train
    optimizer = build_optimizer(
        named,
        train.optimizer,
        learning_rate=learning_rate,
        unfreeze=train.unfreeze,
        average=train.average,
        seed=context.config.run.seed,
    )
    for line in describe_groups(optimizer.param_groups, named):
        context.log(line)
    if (warning := slow_update_warning(optimizer)) is not None:
        context.log(warning)
    return optimizer


def _warn(context: RunContext, model: Any) -> None:
    config, log = context.config, context.log
    lora = config.model.lora
    for warning in precision_warnings(
        dtype=config.model.dtype,
        is_lora=adapter_of(config) is not None,
        modules_to_save=lora.modules_to_save if lora else (),
        uses_stochastic_rounding=config.train.optimizer.stochastic_rounding,
        state_dtype=config.train.optimizer.state_dtype,
    ):
        log(f"warning: {warning}")
    missing = (
        missing_kernel_warning(is_half=_is_half(config), has_sinks=has_sinks(unwrap_model(model).config))
        if is_padding_free(resolve_padding_free(config).batching)
        else None
    )
    if missing and config.model.attention == "auto":
        log(f"warning: {missing}")
    if config.model.activation_offload and config.model.gradient_checkpointing == "selective":
        log(
            "warning: model.activation_offload: only the inputs of layers are offloaded, because "
            "`gradient_checkpointing: selective` keeps what it saves on the device. Write `true` or `false` instead."
        )
    note = base_mismatch_warning(config.model.adapter, name=config.model.name) if config.model.adapter else None
    if note:
        log(note)


def make_step_task(context: RunContext, task: Task, prepared: PreparedModel) -> StepTask:
    """Return the task, or with it what `train.router_aux_loss` adds to its loss and `report.expert_load` to the log."""
    if not prepared.routers:
        return task
    inner = unwrap_model(prepared.unwrapped_model)
    recorder = RoutingRecorder(inner, prepared.routers)
    return RoutedTask(task, recorder, router_coefficient(context.config, inner.config), prepared.before_batch)


def _routers(context: RunContext, plain: Any) -> tuple[Router, ...]:
    """Return the routers where a key is about them, before FSDP1 flattens their weights; log if they are frozen."""
    config = context.config
    if config.train.router_aux_loss is None and not config.report.expert_load:
        return ()
    inner = unwrap_model(plain)
    routers = find_routers(inner)
    places = tuple(f"{_without_wrappers(router.name)}." for router in routers)
    trained = [_without_wrappers(name) for name, each in inner.named_parameters() if each.requires_grad]
    if config.train.router_aux_loss is not None and not any(name.startswith(places) for name in trained):
        context.log(
            "train.router_aux_loss: the routers are frozen; the balance loss trains the layers below them, on whose "
            "output their choice depends"
        )
    return routers


def _without_wrappers(name: str) -> str:
    """Return the name without the parts that adapters on the module add; their parameters stand beside the base."""
    return name.replace(".base_layer", "")


def make_weights(context: RunContext, prepared: PreparedModel) -> EvaluationWeights:
    """Return the weights to evaluate and export: the average where the optimizer keeps one, else the trained."""
    found = average_formula(context.config.train)
    if found is None:
        return TrainedWeights()
    key, formula = found
    return AveragedWeights(build_access(prepared.accelerator, prepared.model, prepared.optimizer), key, formula)


def require_sample_isolation(context: RunContext, training_data: TrainingData, prepared: PreparedModel) -> None:
    """Raise ModelError where the result of a sample would depend on others. Collective.

    Samples that share rows are proved to be kept apart, those that are padded to be as they are alone.
    """
    config, model, task = context.config, prepared.model, training_data.task
    inner = unwrap_model(prepared.unwrapped_model)
    if (warning := randomness(inner.config)) is not None:
        context.log(f"warning: {warning}")
    is_asked_for, is_row = (is_padding_free(each.batching) for each in (config.data, resolve_padding_free(config)))
    is_proved = is_row and not is_asked_for and task.head == "causal_lm" and not carries_state(inner.config)
    if is_proved or task.head in ("image_classification", "image_text_to_text"):
        return
    was_training = model.training
    model.eval()
    (_check_rows if is_row else _check_padding)(context, training_data, prepared)
    model.train(was_training)


def _check_rows(context: RunContext, training_data: TrainingData, prepared: PreparedModel) -> None:
    model, task, device = prepared.model, training_data.task, prepared.accelerator.device
    inner = unwrap_model(prepared.unwrapped_model)
    require_position_ids(frozenset(inspect.signature(inner.forward).parameters), config=inner.config)
    check_isolation(
        partial(_row_logits, model, task.head, device),
        config=inner.config,
        vocabulary_size=len(training_data.tokenizer),
        is_half=_is_half(context.config),
        logits_alone=None if task.head == "causal_lm" else partial(_logits_alone, model, device),
    )


def _check_padding(context: RunContext, training_data: TrainingData, prepared: PreparedModel) -> None:
    config, model = context.config, prepared.model
    inner = unwrap_model(prepared.unwrapped_model)
    has_several = TASKS[config.task.name].has_several_texts
    evaluated = config.evaluate and config.evaluate.microbatch_size
    if {config.train.microbatch_size, evaluated or config.train.microbatch_size} == {1} and not has_several:
        return
    known = positions_of(inner.config)
    check_padding(
        partial(_padded_outputs, model, training_data.task.head, prepared.accelerator.device),
        config=inner.config,
        tokenizer=training_data.tokenizer,
        longest=min(config.data.longest, known.number if known else config.data.longest),
        is_half=_is_half(config),
        advice="Its samples have several texts, so that no batch is without padding: use a model of another type."
        if has_several
        else "Write `train.microbatch_size: 1` and, for evaluations, `evaluate.microbatch_size: 1`: single samples are "
        "not padded.",
    )


def _is_half(config: RunConfig) -> bool:
    return config.train.precision != "fp32" or config.model.dtype != "float32"


def _padded_outputs(
    model: nn.Module, head: ModelHead, device: torch.device, samples: Sequence[Sequence[int]]
) -> Tensor:
    """Return what the model makes of samples that are padded, [samples, tokens, outputs] or [samples, outputs]."""
    rows = [torch.tensor(each, device=device) for each in samples]
    inner: Any = unwrap_model(model)
    pad_id = inner.config.get_text_config().pad_token_id or 0
    inputs = {
        "input_ids": nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id),
        "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "use_cache": False,
    }
    if head == "seq2seq_lm":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    outputs: Any = model(**inputs)
    found: Tensor | None = getattr(outputs, "last_hidden_state" if head == "embedding" else "logits", None)
    if found is None:
        raise ModelError(f"`{inner.config.model_type}` returns no hidden states, of which an embedding could be made.")
    return found


def _row_logits(model: nn.Module, head: ModelHead, device: torch.device, row: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits of the samples end to end, [tokens, outputs], or [samples, outputs] of a classifier."""
    ids = [np.array(each, np.uint32) for each in row]
    samples = [Features({"input_ids": each}) for each in ids]
    batch = collate_row(samples, {"input_ids": ids}, labels=torch.zeros(len(ids))).to(device)
    return sample_logits(model, batch) if head == "sequence_classification" else forward_logits(model, batch)[0]


def _logits_alone(model: nn.Module, device: torch.device, ids: Sequence[int]) -> Tensor:
    """Return the logits of one sample as a batch of its own, in the same shape."""
    given = torch.tensor([ids], device=device)
    logits: Tensor = model(input_ids=given, attention_mask=torch.ones_like(given)).logits
    return logits if logits.dim() == 2 else logits[0]
