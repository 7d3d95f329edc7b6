"""The model that a job trains: loaded, with rows for its new tokens, its adapters, and everything else frozen."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from finetune.config.sections.model import ModelSection, NewTokensSection
from finetune.errors import ModelError
from finetune.model.activations import offload_activations
from finetune.model.adapters.context import AdapterContext, adapter_config
from finetune.model.batch_norm import set_batch_norm
from finetune.model.frozen_models import unquantized_weights_folder
from finetune.model.layers import freeze, train_only
from finetune.model.loading.architecture import SpecialTokenIds
from finetune.model.loading.load import load_model
from finetune.runtime.optional import lazily
from finetune.runtime.parameters import InitContext
from finetune.runtime.seeds import derive_seed

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


def new_token_ids(tokenizer: PreTrainedTokenizerBase, section: NewTokensSection) -> tuple[int, ...]:
    """Return the ids of the new tokens in a tokenizer that has them."""
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in (*section.tokens, *section.special) if token not in vocabulary]
    if missing:
        raise ModelError(f"model.new_tokens: the run's tokenizer does not have `{missing[0]}`.")
    return tuple(vocabulary[token] for token in (*section.tokens, *section.special))


def add_embedding_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    section: NewTokensSection,
    *,
    seed: int,
    init_context: InitContext,
) -> None:
    """Resize embeddings and head to the tokenizer, and initialize the rows of the new tokens.

    The rows depend only on the seed, the token and the existing rows, and are computed in float32. Tied weights stay
    tied; a head's bias starts at zero. A rank that builds on the meta device is only resized. Collective under ZeRO-3.
    """
    ids = new_token_ids(tokenizer, section)
    if model.config.get_text_config().vocab_size < len(tokenizer):
        with torch.random.fork_rng(devices=()):
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    if init_context.on_meta_device:
        return
    texts = (*section.tokens, *section.special)
    num_existing = min(ids)
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = {id(layer.weight): layer.weight for layer in layers if layer is not None}  # tied ones once
    for weight in weights.values():
        with torch.no_grad(), init_context.gather([weight]):
            existing = weight[:num_existing].float()  # [tokens, width]
            rows = []
            for text in texts:
                pieces = list(_subword_ids(tokenizer, text, below=num_existing)) if section.init == "pieces" else []
                if section.init == "random":  # normal, with the standard deviation of the existing rows
                    generator = torch.Generator().manual_seed(derive_seed(seed, "new tokens", text))
                    row = torch.randn(existing.shape[1], generator=generator).to(existing) * existing.std()
                else:
                    row = existing[pieces].mean(dim=0) if pieces else existing.mean(dim=0)
                rows.append(row)
            weight[list(ids)] = torch.stack(rows).to(weight)


def _subword_ids(tokenizer: Any, text: str, *, below: int) -> Sequence[int]:
    """Return the ids into which the tokenizer splits the text without the new token."""
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        pieces = tokenizer.convert_tokens_to_ids(tokenizer._tokenize(text))
    else:
        normal = backend.normalizer.normalize_str(text) if backend.normalizer is not None else text
        split = backend.pre_tokenizer.pre_tokenize_str(normal) if backend.pre_tokenizer is not None else [(normal, ())]
        pieces = [token.id for word, _ in split for token in backend.model.tokenize(word)]
    return [piece for piece in pieces if piece is not None and piece < below]
