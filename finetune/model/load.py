"""The model: by hub name, from a folder, or from its config with random weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from finetune.config.sections.model import ModelSection
from finetune.errors import ModelError
from finetune.model.architecture import SpecialIds, architecture
from finetune.model.attention import attention_implementation
from finetune.model.hollow import give_places
from finetune.model.hub import is_folder, located, told
from finetune.model.initialize import draw_weights
from finetune.runtime.construction import Construction
from finetune.runtime.hub import is_offline, without_vain_retries

HEADS: dict[str, Any] = {"causal_lm": AutoModelForCausalLM}


def load_model(
    section: ModelSection,
    *,
    head: str,
    construction: Construction,
    seed: int,
    vocabulary_size: int,
    special_ids: SpecialIds | None = None,
) -> PreTrainedModel:
    """Return the model in training mode with the head, dtype and attention asked for; raises ModelError.

    Random weights depend on `seed` and module names alone. A hollow rank gets places without values and downloads no
    weights. Collective under ZeRO-3.
    """
    attention = attention_implementation(section.attention)
    if section.from_config is not None:
        config = architecture(
            section.from_config, vocabulary_size=vocabulary_size, special_ids=special_ids or SpecialIds()
        )
        model = _built(config, section=section, head=head, construction=construction, attention=attention)
        if not construction.is_hollow:
            draw_weights(model, seed=seed, gather=construction.gather)
    elif construction.is_hollow:
        config = _pretrained_config(section)
        model = _built(config, section=section, head=head, construction=construction, attention=attention)
    else:
        model = _pretrained(section, head=head, construction=construction, attention=attention)
    _check_vocabulary(model, vocabulary_size=vocabulary_size)
    return _ready_to_train(model, section=section)


def _built(
    config: PreTrainedConfig, *, section: ModelSection, head: str, construction: Construction, attention: str | None
) -> PreTrainedModel:
    kind = config.model_type
    with told(kind, key="model"), torch.random.fork_rng(devices=()), construction.context():
        model = HEADS[head].from_config(
            config,
            dtype=getattr(torch, section.dtype),
            attn_implementation=attention,
            trust_remote_code=section.trust_remote_code,
        )
    if construction.is_hollow:
        give_places(model)
    return model


def _origin(section: ModelSection) -> dict[str, Any]:
    name = section.name or ""
    place = located(name, key="model.name")
    if is_folder(name) and (Path(place) / "adapter_config.json").exists():
        raise ModelError(
            f"model.name: {place} holds an adapter, not a model. Name the base it was trained on "
            "(`base_model_name_or_path` in its adapter_config.json)."
        )
    return {
        "pretrained_model_name_or_path": place,
        "revision": section.revision,
        "cache_dir": section.cache_folder,
        "trust_remote_code": section.trust_remote_code,
        "local_files_only": is_folder(name) or is_offline(),
    }


def _pretrained_config(section: ModelSection) -> PreTrainedConfig:
    name, origin = str(section.name), _origin(section)
    with told(name, key="model.name"), without_vain_retries(is_local=is_folder(name)):
        return AutoConfig.from_pretrained(**origin)


def _pretrained(
    section: ModelSection, *, head: str, construction: Construction, attention: str | None
) -> PreTrainedModel:
    name, origin = str(section.name), _origin(section)
    with told(name, key="model.name"), without_vain_retries(is_local=is_folder(name)), construction.context():
        model, loading = HEADS[head].from_pretrained(
            **origin,
            dtype=getattr(torch, section.dtype),
            attn_implementation=attention,
            output_loading_info=True,
        )
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ModelError(
            f"model.name: the weights of `{section.name}` lack {len(missing)} of the model's parameters "
            f"({', '.join(missing[:3])}, ...), which would be random. Name a model that was saved with this head."
        )
    return model


def _check_vocabulary(model: PreTrainedModel, *, vocabulary_size: int) -> None:
    size = model.config.get_text_config().vocab_size
    if size < vocabulary_size:
        raise ModelError(
            f"model.tokenizer: the tokenizer has {vocabulary_size} tokens and the model only {size} embeddings. "
            "Use the model's own tokenizer."
        )


def _ready_to_train(model: PreTrainedModel, *, section: ModelSection) -> PreTrainedModel:
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if inputs is not None and outputs is not None:
        model.config.tie_word_embeddings = inputs.weight is outputs.weight
    model.config.use_cache = False  # generation asks for its cache through generation_config
    if section.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ModelError(
                f"model.gradient_checkpointing: `{model.config.model_type}` does not support it. Write `false`."
            )
        _enable_checkpointing(model)
    return model.train()


def _enable_checkpointing(model: PreTrainedModel) -> None:
    """Switch it on without reentrance, the only way that FSDP2 and frozen bases both allow."""
    settings = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:  # transformers before 5.20 or so; may go when pyproject.toml asks for a newer one
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
