"""Padding-free batches: used where the model is known to keep samples apart that share one row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.config.rules.model import PROMPT_ADAPTERS, adapter_of
from finetune.config.rules.task import PADDED_TASKS
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import DataSection
from finetune.errors import ModelError
from finetune.model.attention.implementation import supports_packed_samples
from finetune.model.loading.architecture import load_model_config
from finetune.model.loading.pretrained import ADAPTER_CONFIG, read_adapter_config

AdapterConfig = Mapping[str, Any] | None
"""What an adapter_config.json says."""

ATTENTION_WITHOUT_MASK = ("auto", "flash_attention_2", "flash_attention_3")
"""Values of `model.attention` that are told where samples begin and need no mask of the whole row."""


def resolve_padding_free(config: RunConfig, *, model: Any = None, adapter: AdapterConfig = None) -> DataSection:
    """Return `data:` with `padding_free: auto` settled, the same on every rank.

    It depends on the job and on the model's config alone: a run that goes on lays its samples out as before. `model` is
    the config of a model in place of the job's, with the adapter beside it.
    """
    data = config.data
    if data.batching.padding_free != "auto":
        return data
    is_free = data.batching.by != "packs" and can_share_rows(config, model=model, adapter=adapter)
    return data.model_copy(update={"batching": data.batching.model_copy(update={"padding_free": is_free})})


def format_padding_free(config: RunConfig, data: DataSection) -> tuple[str, ...]:
    """Return what `auto` has come to, where the task leaves a choice."""
    if config.task.name in PADDED_TASKS or config.data.batching.padding_free != "auto" or data.batching.by == "packs":
        return ()
    if data.batching.padding_free is True:
        return ("padding-free batches: the model keeps the samples of a row apart",)
    return ("samples are padded: this model or its attention is not known to keep packed samples apart",)


def can_share_rows(config: RunConfig, *, model: Any = None, adapter: AdapterConfig = None) -> bool:
    """Tell whether samples may stand in one row without a proof by the model itself."""
    if config.task.name in PADDED_TASKS or config.model.attention not in ATTENTION_WITHOUT_MASK:
        return False
    if _has_prompt_adapter(config, adapter):
        return False
    try:
        return supports_packed_samples(load_model_config(config.model) if model is None else model)
    except ModelError:
        return False  # there is no such model here, which is said where it is loaded


def _has_prompt_adapter(config: RunConfig, adapter: AdapterConfig) -> bool:
    """Tell whether something is learnt before the text, which samples in one row would share."""
    if adapter is None and config.model.adapter is not None:
        path = Path(config.model.adapter).expanduser() / ADAPTER_CONFIG
        adapter = read_adapter_config(path.parent) if path.is_file() else None
    kind = adapter_of(config) if adapter is None else str(adapter.get("peft_type", "")).lower()
    return kind in PROMPT_ADAPTERS
