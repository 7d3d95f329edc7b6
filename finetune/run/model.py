"""The model that a job names, built: weights, adapters, and which of its parameters learn."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.config.run_config import RunConfig
from finetune.model.adapters.ground import Ground
from finetune.model.adapters.wish import adapter_wish
from finetune.model.architecture import SpecialIds
from finetune.model.batch_norm import set_batch_norm
from finetune.model.freeze import freeze, train_only
from finetune.model.load import load_model
from finetune.model.new_tokens import give_rows, new_ids
from finetune.model.offload import offload_activations
from finetune.model.quantize import weights_folder
from finetune.runtime.construction import Construction
from finetune.runtime.lazy import lazily
from finetune.task.protocol import Task

with lazily():
    from finetune.model.adapters import build


def build_model(
    config: RunConfig, *, task: Task, tokenizer: PreTrainedTokenizerBase | None, construction: Construction
) -> Any:
    """Return the model as it is before its first step. Collective under ZeRO-3."""
    model = _learning(config, task=task, tokenizer=tokenizer, construction=construction)
    if config.model.activation_offload:
        offload_activations(model)
    return model


def _learning(
    config: RunConfig, *, task: Task, tokenizer: PreTrainedTokenizerBase | None, construction: Construction
) -> Any:
    section, seed = config.model, config.run.seed
    if section.quantization is not None:
        construction = replace(construction, context=nullcontext, is_hollow=False)  # Accelerate sends no packed weights
    ids = () if section.new_tokens is None or tokenizer is None else new_ids(tokenizer, section.new_tokens)
    model: Any = load_model(
        section,
        head=task.head,
        construction=construction,
        seed=seed,
        vocabulary_size=None if tokenizer is None else len(tokenizer) - len(ids),
        special_ids=None if tokenizer is None else _special_ids(tokenizer),
        head_values=task.head_values,
    )
    set_batch_norm(model, section.batch_norm, is_new=section.from_config is not None)
    if section.new_tokens is not None and tokenizer is not None:
        give_rows(model, tokenizer, section.new_tokens, seed=seed, construction=construction)
    wish = adapter_wish(section)
    if wish is not None:
        ground = Ground(
            seed=seed,
            head=task.head,
            revision=section.revision,
            construction=construction,
            tokenizer=tokenizer,
            new_ids=ids,
            base=weights_folder(section),
        )
        return build.add_adapter(model, wish, ground)
    freeze(model, section.freeze)
    train_only(model, section.train_only)
    return model


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> SpecialIds:
    return SpecialIds(bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id)
