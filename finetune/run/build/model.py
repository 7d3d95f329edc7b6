"""The model that a job names: weights, adapters, and which of its parameters are trained."""

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.config.load import LoadedConfig
from finetune.config.run_config import RunConfig
from finetune.config.section import parent_keys, with_location
from finetune.config.sections.model import ModelSection
from finetune.errors import ConfigError, ModelError, Problem
from finetune.model.activation_offload import offload_activations
from finetune.model.adapters.context import AdapterContext, adapter_config
from finetune.model.batch_norm import set_batch_norm
from finetune.model.freeze import freeze, train_only
from finetune.model.loading.architecture import SpecialTokenIds
from finetune.model.loading.dry_run import dry_run_model
from finetune.model.loading.load import load_model
from finetune.model.new_tokens import add_embedding_rows, new_token_ids
from finetune.model.quantize import unquantized_weights_folder
from finetune.runtime.optional import lazily
from finetune.runtime.parameters import InitContext
from finetune.task.protocol import Task
from finetune.task.registry import model_head

with lazily():
    from finetune.model.adapters import build


def build_model(
    config: RunConfig, *, task: Task, tokenizer: PreTrainedTokenizerBase | None, init_context: InitContext
) -> Any:
    """Return the model as it is before its first step. Collective under ZeRO-3."""
    model = _build_trainable(config, task=task, tokenizer=tokenizer, init_context=init_context)
    if config.model.activation_offload:
        offload_activations(model)
    return model


def _build_trainable(
    config: RunConfig, *, task: Task, tokenizer: PreTrainedTokenizerBase | None, init_context: InitContext
) -> Any:
    section, seed = config.model, config.run.seed
    if _computes_from_weights(section):
        init_context = replace(init_context, device=None)  # on the CPU, so that initial values do not depend on devices
    if section.quantization is not None:
        init_context = replace(
            init_context, context=nullcontext, on_meta_device=False
        )  # Accelerate sends no packed weights
    ids = () if section.new_tokens is None or tokenizer is None else new_token_ids(tokenizer, section.new_tokens)
    model: Any = load_model(
        section,
        head=task.head,
        init_context=init_context,
        seed=seed,
        vocabulary_size=None if tokenizer is None else len(tokenizer) - len(ids),
        special_ids=None if tokenizer is None else _special_ids(tokenizer),
        head_values=task.head_values,
    )
    set_batch_norm(model, section.batch_norm, is_new=section.from_config is not None)
    if section.new_tokens is not None and tokenizer is not None:
        add_embedding_rows(model, tokenizer, section.new_tokens, seed=seed, init_context=init_context)
    wish = adapter_config(section)
    if wish is not None:
        ground = AdapterContext(
            seed=seed,
            head=task.head,
            revision=section.revision,
            init_context=init_context,
            tokenizer=tokenizer,
            new_ids=ids,
            base=unquantized_weights_folder(section),
        )
        return build.add_adapter(model, wish, ground)
    freeze(model, section.freeze)
    train_only(model, section.train_only)
    return model


def _computes_from_weights(section: ModelSection) -> bool:
    """Tell whether initial values are computed from the loaded ones."""
    lora = section.lora
    has_factors_of_weights = lora is not None and (lora.dora or lora.init not in ("default", "gaussian"))
    return has_factors_of_weights or section.new_tokens is not None or section.prompt_tuning is not None


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> SpecialTokenIds:
    return SpecialTokenIds(bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id)


_KEY = re.compile(r"(model\.(?:from_config|config)(?:\.\w+)*): (.*)", re.DOTALL)


def require_buildable(loaded: LoadedConfig) -> None:
    """Raise ModelError where the job's model cannot be built, or not be asked anything; takes no memory for weights.

    Where a value of `model.from_config` or `model.config` is the reason, it is a ConfigError with its line.
    """
    try:
        dry_run_model(loaded.config.model, head=model_head(loaded.config.task.name))
    except ModelError as error:
        named = _KEY.fullmatch(str(error))
        if named is None:
            raise
        key, message = named.groups()
        written = next((each for each in (key, *parent_keys(key)) if each in loaded.sources), key)
        text = message if written == key else f"{key.removeprefix(written).lstrip('.')}: {message}"
        raise ConfigError([with_location(Problem(written, text), loaded.sources)], loaded.path.name) from error
