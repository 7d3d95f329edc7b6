"""What learns: the Accelerator, and the model and optimizer that it prepared."""

from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from finetune.config.run_config import RunConfig
from finetune.model.architecture import SpecialIds
from finetune.model.freeze import freeze
from finetune.model.load import load_model
from finetune.model.lora import add_lora
from finetune.model.memory import MemoryEstimate, estimate
from finetune.model.precision import precision_warnings
from finetune.model.size import ModelSize, describe
from finetune.report.announcer import Announcer
from finetune.run.lessons import Lessons
from finetune.runtime import seeds
from finetune.strategy.protocol import Sharded, Strategy
from finetune.train.accelerator import build_accelerator, check_prepared
from finetune.train.optimizer import build_optimizer

OPTIMIZER_BYTES = {"adamw": 8, "sgd": 4, "adafactor": 0, "adamw_8bit": 2}
"""Bytes of optimizer state per trained parameter; Adafactor's, a row and a column per matrix, are next to none."""


@dataclass(frozen=True)
class Machine:
    """What learns. `plain_model` is as the model wing built it; its parameters may be split by now."""

    accelerator: Accelerator
    plain_model: Any
    model: Any
    optimizer: Any


def make_machine(
    config: RunConfig, strategy: Strategy, *, lessons: Lessons, learning_rate: float, say: Announcer
) -> Machine:
    """Return the prepared model and optimizer, checked to be what was launched. Collective."""
    if config.run.deterministic:
        seeds.use_deterministic_kernels()
    accelerator = build_accelerator(strategy, precision=config.train.precision)
    plain = _model(config, strategy, lessons=lessons)
    size = describe(plain)
    for line in (*size.lines, *_memory(config, strategy, size=size).lines[-1:]):
        say(line)
    _warn(config, say)
    optimizer = build_optimizer(plain.named_parameters(), config.train.optimizer, learning_rate=learning_rate)
    model, prepared = accelerator.prepare(plain, optimizer)
    check_prepared(model, strategy.expected(), strategy=strategy.name)
    return Machine(accelerator, plain, model, prepared)


def _model(config: RunConfig, strategy: Strategy, *, lessons: Lessons) -> Any:
    section, seed = config.model, config.run.seed
    model: Any = load_model(
        section,
        head=lessons.task.head,
        construction=strategy.construction(),
        seed=seed,
        vocabulary_size=len(lessons.tokenizer),
        special_ids=_special_ids(lessons.tokenizer),
    )
    if section.lora:
        return add_lora(model, section.lora, seed=seed, revision=section.revision, head=lessons.task.head)
    freeze(model, section.freeze)
    return model


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> SpecialIds:
    return SpecialIds(bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id)


def _memory(config: RunConfig, strategy: Strategy, *, size: ModelSize) -> MemoryEstimate:
    sharded = strategy.sharded()
    return estimate(
        weights_bytes=sum(size.bytes_by_dtype.values()),
        trained_bytes=sum(size.trained_bytes_by_dtype.values()),
        num_trained=size.num_trained,
        optimizer_bytes_per_parameter=OPTIMIZER_BYTES[config.train.optimizer.name],
        shards=strategy.expected().num_shards,
        shards_weights=Sharded.PARAMETERS in sharded,
        shards_gradients=Sharded.GRADIENTS in sharded,
        shards_optimizer=Sharded.OPTIMIZER in sharded,
    )


def _warn(config: RunConfig, say: Announcer) -> None:
    lora = config.model.lora
    for warning in precision_warnings(
        dtype=config.model.dtype,
        is_lora=lora is not None,
        modules_to_save=lora.modules_to_save if lora else (),
    ):
        say(f"warning: {warning}")
