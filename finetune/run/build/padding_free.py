"""Padding-free batches: used where the model is known to keep samples apart that share one row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.config.rules.model import PROMPT_ADAPTERS, adapter_of
from finetune.config.rules.task import PADDED_TASKS, TASKS_WITHOUT_TOKENS
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import DataSection
from finetune.errors import ModelError
from finetune.model.attention.implementation import supports_packed_samples
from finetune.model.frozen_models import load_teacher_config
from finetune.model.loading.architecture import load_model_config
from finetune.model.loading.pretrained import ADAPTER_CONFIG, read_adapter_config

AdapterConfig = Mapping[str, Any] | None
"""What an adapter_config.json says."""

ATTENTION_WITHOUT_MASK = ("auto", "flash_attention_2", "flash_attention_3")
"""Values of `model.attention` that are told where samples begin and need no mask of the whole row."""


def resolve_padding_free(config: RunConfig, *, model: Any = None, adapter: AdapterConfig = None) -> DataSection:
    """Return `data:` with `auto` of `padding_free` and `length_window_steps` settled, the same on every rank.

    It depends on the job and on the model's config alone: a run that goes on lays its samples out as before. `model` is
    the config of a model in place of the job's, with the adapter beside it.
    """
    data, batching = config.data, config.data.batching
    is_free = batching.padding_free
    if is_free == "auto":
        is_free = batching.by != "packs" and can_share_rows(config, model=model, adapter=adapter)
    steps = batching.length_window_steps
    if steps == "auto":
        is_sorted = batching.by == "samples" and not is_free and config.task.name not in TASKS_WITHOUT_TOKENS
        steps = 1 if is_sorted else 0
    settled = {"padding_free": is_free, "length_window_steps": steps}
    return data.model_copy(update={"batching": batching.model_copy(update=settled)})


def format_padding_free(config: RunConfig, data: DataSection) -> tuple[str, ...]:
    """Return what `auto` has come to, where the task leaves a choice."""
    if config.task.name in PADDED_TASKS or config.data.batching.padding_free != "auto" or data.batching.by == "packs":
        return ()
    if data.batching.padding_free is True:
        return ("padding-free batches: the model keeps the samples of a row apart",)
    how = ", and sorted by length within each step" if data.batching.length_window_steps == 1 else ""
    return (f"samples are padded{how}: this model or its attention is not known to keep packed samples apart",)


def can_share_rows(config: RunConfig, *, model: Any = None, adapter: AdapterConfig = None) -> bool:
    """Tell whether samples may stand in one row without a proof by the model itself."""
    if config.task.name in PADDED_TASKS or config.model.attention not in ATTENTION_WITHOUT_MASK:
        return False
    if _has_prompt_adapter(config, adapter):
        return False
    try:
        own = load_model_config(config.model) if model is None else model
        return all(supports_packed_samples(each) for each in (own, *_teachers(config)))
    except ModelError:
        return False  # there is no such model here, which is said where it is loaded


def _teachers(config: RunConfig) -> tuple[Any, ...]:
    """Return the config of the teacher, which reads the same rows, where there is one."""
    section = config.task.distillation
    return () if section is None else (load_teacher_config(section, model=config.model),)


def _has_prompt_adapter(config: RunConfig, adapter: AdapterConfig) -> bool:
    """Tell whether something is learnt before the text, which samples in one row would share."""
    if adapter is None and config.model.adapter is not None:
        path = Path(config.model.adapter).expanduser() / ADAPTER_CONFIG
        adapter = read_adapter_config(path.parent) if path.is_file() else None
    kind = adapter_of(config) if adapter is None else str(adapter.get("peft_type", "")).lower()
    return kind in PROMPT_ADAPTERS
