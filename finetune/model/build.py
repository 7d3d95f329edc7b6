"""The model that a job trains: loaded, with its new tokens and adapters, and with everything else frozen."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.config.sections.model import ModelSection
from finetune.model.activations import offload_activations
from finetune.model.adapters.context import AdapterContext, adapter_config
from finetune.model.batch_norm import set_batch_norm
from finetune.model.layers import freeze, train_only
from finetune.model.loading.architecture import SpecialTokenIds
from finetune.model.loading.load import load_model
from finetune.model.quantize import unquantized_weights_folder
from finetune.model.tokenizer import add_embedding_rows, new_token_ids
from finetune.runtime.optional import lazily
from finetune.runtime.parameters import InitContext

with lazily():
    from finetune.model.adapters import build, single_pass


def build_model(
    section: ModelSection,
    *,
    head: str,
    head_values: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
    init_context: InitContext,
    recorded: Collection[str] = (),
) -> Any:
    """Return the model as it is before its first step. Collective under ZeRO-3.

    `head_values` are config values set by the task. `recorded`: the names of the parameters in the checkpoint that will
    be loaded into it. A checkpoint of an older version has adapters where peft chose to add them.
    """
    if computes_from_weights(section):
        init_context = replace(init_context, device=None)  # on the CPU, so that initial values do not depend on devices
    if section.quantization is not None:  # Accelerate sends no packed weights
        init_context = replace(init_context, context=nullcontext, on_meta_device=False)
    ids: Sequence[int] = ()
    vocabulary_size, special_ids = None, None
    if tokenizer is not None:
        ids = () if section.new_tokens is None else new_token_ids(tokenizer, section.new_tokens)
        vocabulary_size = len(tokenizer) - len(ids)
        special_ids = SpecialTokenIds(tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    model: Any = load_model(
        section,
        head=head,
        init_context=init_context,
        seed=seed,
        vocabulary_size=vocabulary_size,
        special_ids=special_ids,
        head_values=head_values,
    )
    context = AdapterContext(
        seed=seed,
        head=head,
        revision=section.revision,
        init_context=init_context,
        tokenizer=tokenizer,
        new_ids=ids,
        base=unquantized_weights_folder(section),
        recorded=recorded,
    )
    return make_trainable(model, section, context)


def make_trainable(model: Any, section: ModelSection, context: AdapterContext) -> Any:
    """Return the loaded model with its new tokens and adapters, and with everything else frozen; raises ModelError."""
    set_batch_norm(model, section.batch_norm, is_new=section.from_config is not None)
    if section.new_tokens is not None and context.tokenizer is not None:
        add_embedding_rows(
            model, context.tokenizer, section.new_tokens, seed=context.seed, init_context=context.init_context
        )
    if (adapter := adapter_config(section)) is not None:
        model = build.add_adapter(model, adapter, context)
        single_pass.use_single_pass(model, in_place=section.gradient_checkpointing != "selective")
    else:
        freeze(model, section.freeze)
        train_only(model, section.train_only)
    if section.activation_offload:
        offload_activations(model)
    return model


def computes_from_weights(section: ModelSection) -> bool:
    """Return whether initial values are computed from the loaded ones."""
    requested = section.lora
    has_factors_of_weights = requested is not None and (requested.dora or requested.init not in ("default", "gaussian"))
    has_embeddings = section.peft is not None and section.peft.type == "prompt_tuning"
    return has_factors_of_weights or section.new_tokens is not None or has_embeddings
