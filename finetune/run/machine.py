"""What learns: the Accelerator, and the model and optimizer that it prepared."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from finetune.config.rules.model import adapter_of
from finetune.config.run_config import RunConfig
from finetune.data.batch import Batch
from finetune.model.adapters.saved_folder import base_note
from finetune.model.attention.kernels import missing_kernel
from finetune.model.compiled import compile_model
from finetune.model.head_unit import whole_head
from finetune.model.image_processor import check_pixels
from finetune.model.layers import telling_width
from finetune.model.memory import AVERAGE_BYTES, MemoryEstimate, estimate, state_bytes
from finetune.model.precision import precision_warnings
from finetune.model.size import ModelSize, describe
from finetune.report.announcer import Announcer
from finetune.run.adapters import require_ties_fit
from finetune.run.layout import settled
from finetune.run.lessons import Lessons
from finetune.run.model import build_model
from finetune.runtime import seeds
from finetune.strategy.buckets import fill_buckets
from finetune.strategy.buffers import buffers_from_rank_0
from finetune.strategy.held import weights_as_held
from finetune.strategy.prefetch import prefetch_layers
from finetune.strategy.protocol import Sharded, Strategy
from finetune.strategy.waiting import leave_waiting_out_of_norm
from finetune.task.collate import is_end_to_end
from finetune.task.forward import innermost
from finetune.train.accelerator import build_accelerator, check_prepared
from finetune.train.groups import Named, describe_groups, named_of
from finetune.train.noise import EmbeddingNoise
from finetune.train.optimizer import build_optimizer
from finetune.train.parts import nothing


@dataclass(frozen=True)
class Machine:
    """What learns. `plain_model` is as the model wing built it; its parameters may be split by now."""

    accelerator: Accelerator
    plain_model: Any
    model: Any
    optimizer: Any
    before_batch: Callable[[Batch], None] = nothing  # to be told of each batch before the model learns from it


def make_accelerator(config: RunConfig, strategy: Strategy) -> Accelerator:
    """Return the Accelerator of the strategy that was launched; from here on the ranks can speak. Collective."""
    if config.run.deterministic:
        seeds.use_deterministic_kernels()
    return build_accelerator(strategy, precision=config.train.precision)


def make_machine(
    config: RunConfig,
    strategy: Strategy,
    *,
    accelerator: Accelerator,
    lessons: Lessons,
    learning_rate: float,
    say: Announcer,
) -> Machine:
    """Return the prepared model and optimizer, checked to be what was launched. Collective."""
    plain = build_model(config, task=lessons.task, tokenizer=lessons.tokenizer, construction=strategy.construction())
    check_pixels(plain.config, lessons.processing.processor)
    require_ties_fit(plain, strategy.name)
    size = describe(plain)
    for line in (*size.lines, *_memory(config, strategy, size=size).lines[-1:]):
        say(line)
    _warn(config, say)
    optimizer = _optimizer(config, named_of(plain), learning_rate=learning_rate, say=say)
    noise = config.train.embedding_noise
    before_batch = EmbeddingNoise(plain, alpha=noise).tell if noise else nothing
    _compile(config, strategy, innermost(plain), say=say)
    held = weights_as_held(accelerator, is_wanted=config.train.optimizer.stochastic_rounding)
    with telling_width(plain.config), whole_head(innermost(plain)), buffers_from_rank_0(accelerator, plain), held:
        fill_buckets(accelerator, plain)
        model, prepared = accelerator.prepare(plain, optimizer)
    check_prepared(model, strategy.expected(), strategy=strategy.name)
    prefetch_layers(accelerator, model)
    if config.train.unfreeze:
        leave_waiting_out_of_norm(model)
    return Machine(accelerator, plain, model, prepared, before_batch)


def _compile(config: RunConfig, strategy: Strategy, model: Any, *, say: Announcer) -> None:
    """Compile what the job says, before a strategy wraps or splits it; under ZeRO-3 tell that nothing is."""
    if config.model.compile == "off":
        return
    if strategy.name == "zero3":
        say(
            f"warning: model.compile: {config.model.compile} was asked for, and nothing is compiled: ZeRO-3 gathers "
            "parameters in hooks of every module, at each of which a compiled graph would end. Launch with fsdp2.yaml."
        )
        return
    compile_model(model, config.model.compile, say=say)


def _optimizer(config: RunConfig, named: list[Named], *, learning_rate: float, say: Announcer) -> torch.optim.Optimizer:
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
        say(line)
    return optimizer


def _memory(config: RunConfig, strategy: Strategy, *, size: ModelSize) -> MemoryEstimate:
    sharded, train, distillation = strategy.sharded(), config.train, config.task.distillation
    trained = sum(size.trained_bytes_by_dtype.values())
    is_master = strategy.name.startswith("zero")  # its optimizer holds float32 copies
    state = state_bytes(
        train.optimizer.name,
        train.optimizer.state_dtype,
        num_trained=size.num_trained,
        trained_bytes=max(trained, 4 * size.num_trained) if is_master else trained,
    )
    return estimate(
        weights_bytes=sum(size.bytes_by_dtype.values()),
        gradients_bytes=size.largest_trained_bytes if train.optimizer.in_backward else trained,
        optimizer_bytes=state + (AVERAGE_BYTES * size.num_trained if train.average else 0),
        is_beside_teacher=distillation is not None and not distillation.cache,
        shards=strategy.expected().num_shards,
        shards_weights=Sharded.PARAMETERS in sharded,
        shards_gradients=Sharded.GRADIENTS in sharded,
        shards_optimizer=Sharded.OPTIMIZER in sharded,
    )


def _warn(config: RunConfig, say: Announcer) -> None:
    lora = config.model.lora
    for warning in precision_warnings(
        dtype=config.model.dtype,
        is_lora=adapter_of(config) is not None,
        modules_to_save=lora.modules_to_save if lora else (),
        rounds_by_chance=config.train.optimizer.stochastic_rounding,
        state_dtype=config.train.optimizer.state_dtype,
    ):
        say(f"warning: {warning}")
    is_half = config.train.precision != "fp32" or config.model.dtype != "float32"
    missing = missing_kernel(is_half=is_half) if is_end_to_end(settled(config).batching) else None
    if missing and config.model.attention == "auto":
        say(f"warning: {missing}")
    note = base_note(config.model.adapter, name=config.model.name) if config.model.adapter else None
    if note:
        say(note)
