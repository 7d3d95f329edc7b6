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
from finetune.model.precision import precision_warnings
from finetune.model.size import describe
from finetune.report.announcer import Announcer
from finetune.run.lessons import Lessons
from finetune.runtime import seeds
from finetune.strategy.protocol import Strategy
from finetune.train.accelerator import build_accelerator, check_prepared
from finetune.train.optimizer import build_optimizer


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
    accelerator = build_accelerator(strategy, precision=config.train.precision)
    if config.run.deterministic:
        seeds.use_deterministic_kernels()
    plain = _model(config, strategy, lessons=lessons)
    for line in describe(plain).lines:
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


def _warn(config: RunConfig, say: Announcer) -> None:
    lora = config.model.lora
    for warning in precision_warnings(
        dtype=config.model.dtype,
        is_lora=lora is not None,
        modules_to_save=lora.modules_to_save if lora else (),
    ):
        say(f"warning: {warning}")
