"""The model and optimizer that the Accelerator prepared, and all that was learned about them meanwhile.

Checked with it: the result of a sample does not depend on the others of its batch or row.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune.checkpoint.sharding.access import build_access
from finetune.config.run_config import RunConfig
from finetune.config.sections.train import TrainSection
from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.errors import ModelError
from finetune.memory.state import PredictMemory, predict_memory
from finetune.model.adapters.context import has_adapter
from finetune.model.attention.implementation import check_isolation, require_position_ids
from finetune.model.attention.supported_models import carries_state, check_padding, randomness
from finetune.model.build import build_model
from finetune.model.loading.rope import positions_of
from finetune.model.processing import check_image_shape
from finetune.model.size import measure_model
from finetune.model.tensor_parallel import split_layers
from finetune.registry.tasks import TASKS, ModelHead
from finetune.report.reporter import RunLog
from finetune.run.setup import accelerator as accelerators
from finetune.run.setup.data import PreparedData, TrainingData
from finetune.run.setup.forwards import EmbeddingNoise, attended_tokens, flops_per_token, replace_forwards
from finetune.run.setup.model import (
    computes_in_half,
    model_warnings,
    own_router_coefficient,
    recorded_parameters,
)
from finetune.run.setup.padding_free import resolve_padding_free
from finetune.run.setup.strategy import require_tied_weights_supported
from finetune.runtime import distributed
from finetune.runtime.optional import lazily, no_op
from finetune.runtime.parallel import tensor_group
from finetune.runtime.resources import available_bytes, resident_bytes
from finetune.strategy.gradient_sync import Accumulation, GradientReduction, choose_accumulation
from finetune.strategy.protocol import Strategy
from finetune.task.lm_loss.target_loss import fallback_warning, resolve_kernel
from finetune.task.model_inputs import collate_row, forward_logits, is_padding_free, sample_logits, unwrap_model
from finetune.task.protocol import Task
from finetune.task.router_loss import RoutedTask, Router, RoutingRecorder, find_routers
from finetune.train.evaluate import AveragedWeights, average_formula
from finetune.train.optim.optimizers import build_optimizer, slow_update_warning
from finetune.train.optim.parameter_groups import NamedParameter, describe_groups, list_parameters
from finetune.train.parts import StepTask
from finetune.train.plan import StepPlan

with lazily():
    from finetune.model.adapters import lora


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
    data: PreparedData,
    *,
    accelerator: Accelerator,
    log: RunLog,
    trains: bool = True,
) -> PreparedModel:
    """Return the prepared model and optimizer, checked to be what was launched. Collective."""
    training_data, plan = data.training_data, data.plan if trains else None
    process_bytes = 0 if torch.cuda.is_available() else resident_bytes()  # what `mem` of a step measures
    unwrapped: Any = build_model(
        config.model,
        head=training_data.task.head,
        head_values=training_data.task.head_values,
        tokenizer=training_data.tokenizer,
        seed=config.run.seed,
        init_context=strategy.init_context(accelerator.device),
        recorded=recorded_parameters(config),
    )
    distributed.barrier()  # the first collective over tensors begins when the slowest rank has its weights
    check_image_shape(unwrapped.config, training_data.processing.processor)
    require_tied_weights_supported(unwrapped, strategy.name)
    if strategy.expected.tensor_size > 1:
        log(split_layers(unwrap_model(unwrapped), tensor_group()))
    accumulation, memory = _log_size(
        config, strategy, unwrapped, accelerator=accelerator, plan=plan, process_bytes=process_bytes, log=log
    )
    for warning in model_warnings(config, unwrapped):
        log(warning)
    optimizer = make_optimizer(config, list_parameters(unwrapped), learning_rate=data.plan.schedule.peak, log=log)
    noise = config.train.embedding_noise
    before_batch = EmbeddingNoise(unwrapped, alpha=noise).set_batch if noise else no_op
    replace_forwards(
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
    for line in (*size.lines, lora.adapter_summary(model) if has_adapter(model) else None):
        if line is not None:
            log(line)
    if plan is None or config.train.microbatch_size != "auto":
        log(memory(plan).line)
    return accumulation, memory if plan else None


def _find_routers(config: RunConfig, unwrapped: Any, *, log: RunLog) -> tuple[Router, ...]:
    """Return the routers where a key is about them; log if they are frozen."""
    if config.train.router_aux_loss is None and not config.report.expert_load:
        return ()
    inner = unwrap_model(unwrapped)
    routers = find_routers(inner)
    # Adapters insert parts into names; their parameters are siblings of the base.
    prefixes = tuple(f"{router.name.replace('.base_layer', '')}." for router in routers)
    trained = [name.replace(".base_layer", "") for name, weight in inner.named_parameters() if weight.requires_grad]
    if config.train.router_aux_loss is not None and not any(name.startswith(prefixes) for name in trained):
        log(
            "train.router_aux_loss: the routers are frozen; the balance loss trains the layers below them, on whose "
            "output their choice depends"
        )
    return routers


def make_step_task(config: RunConfig, task: Task, prepared: PreparedModel) -> StepTask:
    """Return the task, or with it what `train.router_aux_loss` adds to its loss and `report.expert_load` to the log."""
    if not prepared.routers:
        return task
    inner = unwrap_model(prepared.unwrapped_model)
    recorder = RoutingRecorder(inner, prepared.routers)
    written = config.train.router_aux_loss
    coefficient = own_router_coefficient(inner.config) if isinstance(written, str) else written
    return RoutedTask(task, recorder, coefficient, prepared.before_batch)


def make_weights(train: TrainSection, prepared: PreparedModel) -> Callable[[], AbstractContextManager[None]]:
    """Return a function whose context swaps in the weights to evaluate and export. Collective.

    They are the average where the optimizer keeps one, else the trained.
    """
    average = average_formula(train)
    if average is None:
        return nullcontext
    key, formula = average
    access = build_access(prepared.accelerator, prepared.model, prepared.optimizer)
    return AveragedWeights(access, key, formula).swapped_in


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


def require_sample_isolation(
    config: RunConfig, training_data: TrainingData, prepared: PreparedModel, *, log: RunLog
) -> None:
    """Raise ModelError where the result of a sample would depend on others. Collective.

    Samples that share rows are checked not to affect each other, padded samples to give the same results as alone.
    """
    model, task = prepared.model, training_data.task
    model_config = unwrap_model(prepared.unwrapped_model).config
    if (warning := randomness(model_config)) is not None:
        log(f"warning: {warning}")
    is_requested = is_padding_free(config.data.batching)
    is_row = is_padding_free(resolve_padding_free(config).batching)
    is_already_checked = is_row and not is_requested and task.head == "causal_lm" and not carries_state(model_config)
    if is_already_checked or task.head in ("image_classification", "image_text_to_text"):
        return
    check = _check_rows if is_row else _check_padding
    was_training = model.training
    model.eval()
    check(config, training_data, prepared)
    model.train(was_training)


def _check_rows(config: RunConfig, training_data: TrainingData, prepared: PreparedModel) -> None:
    model, task, device = prepared.model, training_data.task, prepared.accelerator.device
    inner = unwrap_model(prepared.unwrapped_model)
    require_position_ids(frozenset(inspect.signature(inner.forward).parameters), config=inner.config)

    def row_logits(row: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits of the samples end to end, [tokens, outputs], or [samples, outputs] of a classifier."""
        ids = [np.array(sample, np.uint32) for sample in row]
        samples = [Features({"input_ids": sample}) for sample in ids]
        batch = collate_row(samples, {"input_ids": ids}, labels=torch.zeros(len(ids))).to(device)
        is_classifier = task.head == "sequence_classification"
        return sample_logits(model, batch) if is_classifier else forward_logits(model, batch)[0]

    def logits_alone(ids: Sequence[int]) -> Tensor:
        """Return the logits of one sample as a batch of its own, in the same shape."""
        batch = torch.tensor([ids], device=device)
        logits: Tensor = model(input_ids=batch, attention_mask=torch.ones_like(batch)).logits
        return logits if logits.dim() == 2 else logits[0]

    check_isolation(
        row_logits,
        config=inner.config,
        vocabulary_size=len(training_data.tokenizer),
        is_half=computes_in_half(config),
        logits_alone=None if task.head == "causal_lm" else logits_alone,
    )


def _check_padding(config: RunConfig, training_data: TrainingData, prepared: PreparedModel) -> None:
    model_config = unwrap_model(prepared.unwrapped_model).config
    has_several_texts = TASKS[config.task.name].has_several_texts
    evaluated = config.evaluate and config.evaluate.microbatch_size
    sizes = {config.train.microbatch_size, evaluated or config.train.microbatch_size}
    if sizes == {1} and not has_several_texts:
        return
    positions = positions_of(model_config)
    check_padding(
        partial(_padded_outputs, prepared.model, training_data.task.head, prepared.accelerator.device),
        config=model_config,
        tokenizer=training_data.tokenizer,
        longest=min(config.data.longest, positions.number if positions else config.data.longest),
        is_half=computes_in_half(config),
        advice="Its samples have several texts, so that no batch is without padding: use a model of another type."
        if has_several_texts
        else "Write `train.microbatch_size: 1` and, for evaluations, `evaluate.microbatch_size: 1`: single samples are "
        "not padded.",
    )


def _padded_outputs(
    model: nn.Module, head: ModelHead, device: torch.device, samples: Sequence[Sequence[int]]
) -> Tensor:
    """Return the model's outputs for padded samples, [samples, tokens, outputs] or [samples, outputs]."""
    rows = [torch.tensor(ids, device=device) for ids in samples]
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
    values: Tensor | None = getattr(outputs, "last_hidden_state" if head == "embedding" else "logits", None)
    if values is None:
        raise ModelError(f"`{inner.config.model_type}` returns no hidden states, of which an embedding could be made.")
    return values
