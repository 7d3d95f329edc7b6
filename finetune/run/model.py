"""The model that a job names, built: weights, adapters, and which of its parameters learn."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.config.run_config import RunConfig
from finetune.model.architecture import SpecialIds
from finetune.model.freeze import freeze
from finetune.model.load import load_model
from finetune.model.lora import add_lora
from finetune.runtime.construction import Construction
from finetune.task.protocol import Task


def build_model(
    config: RunConfig, *, task: Task, tokenizer: PreTrainedTokenizerBase | None, construction: Construction
) -> Any:
    """Return the model as it is before its first step. Collective under ZeRO-3."""
    section, seed = config.model, config.run.seed
    model: Any = load_model(
        section,
        head=task.head,
        construction=construction,
        seed=seed,
        vocabulary_size=None if tokenizer is None else len(tokenizer),
        special_ids=None if tokenizer is None else _special_ids(tokenizer),
        head_values=task.head_values,
    )
    if section.lora:
        return add_lora(model, section.lora, seed=seed, revision=section.revision, head=task.head)
    freeze(model, section.freeze)
    return model


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> SpecialIds:
    return SpecialIds(bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id)
