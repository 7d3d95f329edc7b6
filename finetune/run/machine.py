"""What learns: the Accelerator, and the model and optimizer that it prepared."""

from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator

from finetune.config.run_config import RunConfig
from finetune.model.memory import MemoryEstimate, estimate
from finetune.model.precision import precision_warnings
from finetune.model.size import ModelSize, describe
from finetune.report.announcer import Announcer
from finetune.run.lessons import Lessons
from finetune.run.model import build_model
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
    size = describe(plain)
    for line in (*size.lines, *_memory(config, strategy, size=size).lines[-1:]):
        say(line)
    _warn(config, say)
    optimizer = build_optimizer(plain.named_parameters(), config.train.optimizer, learning_rate=learning_rate)
    model, prepared = accelerator.prepare(plain, optimizer)
    check_prepared(model, strategy.expected(), strategy=strategy.name)
    return Machine(accelerator, plain, model, prepared)


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
