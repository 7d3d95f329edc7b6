"""The memory that a rank needs, estimated before the model is prepared; its peak, measured once it trains."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from finetune.config.run_config import RunConfig
from finetune.data.order.dataset_view import DatasetView
from finetune.model.adapters.context import has_adapter
from finetune.model.memory.step import (
    ForwardPass,
    Shapes,
    activation_bytes,
    autocast_bytes,
    gathered_bytes,
    library_bytes,
    loss_bytes,
    read_shapes,
)
from finetune.model.size import AVERAGE_BYTES, MemoryEstimate, ModelSize, estimate_memory, optimizer_state_bytes
from finetune.registry.attention import ATTENTIONS
from finetune.run.context import RunContext
from finetune.run.planned import read_planned
from finetune.run.setup.padding_free import resolve_padding_free
from finetune.runtime.optional import lazily
from finetune.runtime.resources import format_size
from finetune.strategy.protocol import Sharded
from finetune.strategy.reconcile import offloads_optimizer
from finetune.strategy.upstream import zero_bucket_sizes
from finetune.task.lm_loss.chunked_loss import bytes_per_logit, rows_per_chunk
from finetune.task.lm_loss.logit_transform import LogitTransform
from finetune.task.lm_loss.target_loss import MAX_FULL_LOGITS
from finetune.task.model_inputs import is_padding_free, unwrap_model
from finetune.train.meters import peak_memory_bytes
from finetune.train.plan import StepPlan

with lazily():
    from finetune.model.adapters import upstream as adapters

_SEEN_MICROBATCHES = 64
"""At the start of the data, from which the largest is taken."""

_HALF_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

StepMemory = Callable[[StepPlan], Mapping[str, int]]
"""What a step of the plan takes beside weights, gradients and optimizer state, by name."""


@dataclass(frozen=True)
class RankMemory:
    """The memory that a rank needs, for any plan: the one that is trained may have a microbatch size found later."""

    estimate: Callable[..., MemoryEstimate]  # what `memory_estimate` returns in this run
    step: StepMemory
    planned_peak: Callable[[StepPlan], int | None]  # what `finetune plan` predicted
    unsharded_gradient_bytes: int  # of an accumulation

    def of(self, plan: StepPlan) -> MemoryEstimate:
        """Return the memory of a rank under the plan."""
        unsharded = self.unsharded_gradient_bytes if plan.num_batches > 1 else 0
        found = self.estimate(unsharded_gradient_bytes=unsharded, step_parts=self.step(plan))
        return replace(found, planned_bytes=self.planned_peak(plan))


def memory_estimate(
    context: RunContext,
    size: ModelSize,
    *,
    process_bytes: int,
    unsharded_gradient_bytes: int = 0,
    step_parts: Mapping[str, int] | None = None,
) -> MemoryEstimate:
    """Return the memory of a rank; `step_parts` is what a step of the plan takes."""
    config, strategy = context.config, context.strategy
    sharded, train, distillation = strategy.sharded(), config.train, config.task.distillation
    trained = sum(size.trained_bytes_by_dtype.values())
    state = optimizer_state_bytes(
        train.optimizer.name,
        train.optimizer.state_dtype,
        num_trained=size.num_trained,
        trained_bytes=max(trained, 4 * size.num_trained) if _is_zero(context) else trained,
    )
    masters = 4 * size.num_trained if _is_zero(context) else 0  # float32 copies in the optimizer
    return estimate_memory(
        weights_bytes=_held_bytes(context, size.bytes_by_dtype),
        gradients_bytes=size.largest_trained_bytes
        if train.optimizer.in_backward
        else _held_bytes(context, size.trained_bytes_by_dtype),
        optimizer_bytes=state + masters + (AVERAGE_BYTES * size.num_trained if train.average else 0),
        has_teacher=distillation is not None and not distillation.cache,
        process_bytes=process_bytes,
        unsharded_gradient_bytes=unsharded_gradient_bytes,
        step_parts=step_parts,
        shards=strategy.expected().num_shards,
        shards_weights=Sharded.PARAMETERS in sharded,
        shards_gradients=Sharded.GRADIENTS in sharded,
        shards_optimizer=Sharded.OPTIMIZER in sharded,
    )


def step_memory(
    context: RunContext, model: Any, size: ModelSize, *, training: DatasetView, device: torch.device
) -> StepMemory:
    """Return what tells the memory of a step, activations where known; the model is not yet prepared."""
    num_processes = context.strategy.expected().num_processes
    found = {"libraries": library_bytes(has_device=device.type == "cuda", num_processes=num_processes)}
    found["checkpoint copies"] = _copies_in_memory(context, size, device)
    found |= _sharding(context, unwrap_model(model), size)
    found |= _adapted_experts(context, model)
    shapes = read_shapes(unwrap_model(model).config)
    if shapes is None:
        return lambda _: found
    if _item_bytes(context.config) == 2 and context.strategy.name in ("single", "ddp"):
        checkpoints = context.config.model.gradient_checkpointing is True
        found["autocast copies"] = autocast_bytes(unwrap_model(model), checkpoints=checkpoints)
    ranks = context.strategy.expected().sequence_size
    forward = partial(
        _forward_memory, context.config, size, ranks_per_row=ranks, shapes=shapes, training=training, device=device
    )
    return lambda plan: found | forward(plan=plan)


def _forward_memory(
    config: RunConfig,
    size: ModelSize,
    *,
    ranks_per_row: int,
    shapes: Shapes,
    training: DatasetView,
    device: torch.device,
    plan: StepPlan,
) -> dict[str, int]:
    """Return what depends on the microbatch."""
    computed = _forward_pass(config, size, training=training, plan=plan, num_layers=shapes.layers)
    computed = replace(computed, num_tokens=-(-computed.num_tokens // ranks_per_row))
    dtype = torch.float32 if computed.item_bytes == 4 else torch.bfloat16
    logit_bytes = bytes_per_logit(dtype, LogitTransform(), device)
    loss = loss_bytes(
        shapes,
        computed,
        chunk_rows=rows_per_chunk(shapes.vocabulary, device, logit_bytes=logit_bytes),
        logit_bytes=logit_bytes,
        full_logits=MAX_FULL_LOGITS,
        trains_head=size.num_trained == size.num_parameters,
    )
    return {"activations": activation_bytes(shapes, computed), "loss": loss}


def planned_peak(context: RunContext, accelerator: Accelerator, plan: StepPlan) -> int | None:
    """Return the peak, in bytes, that `finetune plan` predicted for this run; None where it was not planned so."""
    config, expected, deepspeed = context.config, context.strategy.expected(), accelerator.state.deepspeed_plugin
    if expected.sequence_size > 1:
        return None  # it plans whole rows
    is_offloaded = deepspeed is not None and offloads_optimizer(deepspeed.deepspeed_config)
    return read_planned(
        config,
        strategy=f"{context.strategy.name}_offload" if is_offloaded else context.strategy.name,
        num_ranks=expected.num_processes,
        num_shards=expected.num_shards,
        microbatch_size=plan.microbatch_size,
        device=accelerator.device.type,
    )


def peak_line(estimate: MemoryEstimate) -> str:
    """Return what was planned and estimated beside the peak so far, of this rank."""
    planned = "" if estimate.planned_bytes is None else f"planned {format_size(estimate.planned_bytes)}, "
    measured = format_size(_peak_bytes())
    return f"memory: {planned}estimated {format_size(estimate.peak_bytes)}, measured peak {measured}"


def _peak_bytes() -> int:
    """Return the peak of the tensors and, on a GPU, what is in use there outside torch's allocator."""
    if not torch.cuda.is_available():
        return peak_memory_bytes()
    free, total = torch.cuda.mem_get_info()
    return peak_memory_bytes() + max(0, total - free - torch.cuda.memory_reserved())


def _is_zero(context: RunContext) -> bool:
    return context.strategy.name.startswith("zero")


def _held_bytes(context: RunContext, by_dtype: Mapping[str, int]) -> int:
    """Return the bytes of weights or gradients as they are kept: DeepSpeed keeps them in the precision of training."""
    if not _is_zero(context) or context.config.train.precision == "fp32":
        return sum(by_dtype.values())
    return sum(size // 2 if dtype == "float32" else size for dtype, size in by_dtype.items())


def _copies_in_memory(context: RunContext, size: ModelSize, device: torch.device) -> int:
    """Return this rank's share of the copies that are written in the background, where that is the same memory."""
    if device.type != "cpu" or not context.config.checkpoint.asynchronous:
        return 0
    train, trained = context.config.train, sum(size.trained_bytes_by_dtype.values())
    state = optimizer_state_bytes(
        train.optimizer.name, train.optimizer.state_dtype, num_trained=size.num_trained, trained_bytes=trained
    )
    return (trained + state) // context.strategy.expected().num_processes


def _sharding(context: RunContext, model: nn.Module, size: ModelSize) -> dict[str, int]:
    """Return what is whole at a time where parameters are sharded, and DeepSpeed's buffers."""
    strategy, item = context.strategy, _HALF_BYTES[context.config.train.precision]
    found = {}
    if Sharded.PARAMETERS in strategy.sharded():
        layers = getattr(read_shapes(model.config), "layers", 1)
        found["gathered layers"] = gathered_bytes(model, num_layers=layers, item_bytes=item, gradient_bytes=item)
    stage = strategy.expected().zero_stage
    if stage is not None:
        width = getattr(read_shapes(model.config), "hidden", 1)
        bucket = zero_bucket_sizes(num_trained=size.num_trained, width=width, stage=stage)["reduce_bucket_size"]
        partition = 4 * size.num_trained // strategy.expected().num_shards
        found["ZeRO buffers"] = 2 * item * bucket + partition  # the gradients, in float32 at the update
    return found


def _adapted_experts(context: RunContext, model: Any) -> dict[str, int]:
    """Return what peft keeps for the backward pass of the parameters that it adapts: their sums with the adapters."""
    sizes = adapters.wrapped_parameter_bytes(model) if has_adapter(model) else ()
    checkpoints = context.config.model.gradient_checkpointing
    kept = max(sizes, default=0) * 2 if checkpoints is True else sum(sizes)  # two matrices of one layer
    return {"adapted experts": kept} if kept else {}


def _forward_pass(
    config: RunConfig, size: ModelSize, *, training: DatasetView, plan: StepPlan, num_layers: int
) -> ForwardPass:
    num_tokens, longest = _largest_microbatch(config, training, plan)
    return ForwardPass(
        num_tokens=num_tokens,
        longest=longest,
        item_bytes=_item_bytes(config),
        stream_bytes=4 if config.model.dtype == "float32" else 2,
        checkpointing=config.model.gradient_checkpointing,
        offloads=bool(config.model.activation_offload),
        has_scores=ATTENTIONS[config.model.attention].stores_scores,
        num_adapted=-(-size.num_adapted_modules // num_layers),
    )


def _item_bytes(config: RunConfig) -> int:
    """Return the bytes of a number of the forward pass."""
    return 4 if config.train.precision == "fp32" and config.model.dtype == "float32" else 2


def _largest_microbatch(config: RunConfig, training: DatasetView, plan: StepPlan) -> tuple[int, int]:
    """Return the tokens of the largest of the first microbatches, padding included, and of its longest sample."""
    batching, num = config.data.batching, plan.microbatch_size
    if batching.by != "samples":
        budget = batching.tokens or config.data.longest
        return num * budget, budget
    available = min(_SEEN_MICROBATCHES * num, plan.num_positions or num)
    ids = training.order.samples(0, available)
    lengths = training.samples.lengths_of(ids)
    batches = [lengths[start : start + num] for start in range(0, len(lengths), num)]
    longest = [min(int(each.max()), config.data.longest) for each in batches]  # a sequence: samples may have several
    if is_padding_free(resolve_padding_free(config).batching):
        return max((int(each.sum()), length) for each, length in zip(batches, longest, strict=True))
    return max((num * length, length) for length in longest)
