"""Padding-free batches: used where the model is known to keep samples apart that share one row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import read_manifest_of_step
from finetune.config.paths import is_url
from finetune.config.rules.model import PROMPT_ADAPTERS, adapter_of
from finetune.config.rules.task import PADDED_TASKS
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import DataSection
from finetune.errors import CheckpointError, ModelError
from finetune.model.attention.supported_models import needs_own_attention, padding_reason, was_once_padded
from finetune.model.loading.architecture import load_model_config
from finetune.model.loading.pretrained import ADAPTER_CONFIG, read_adapter_config
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER

AdapterConfig = Mapping[str, Any] | None
"""What an adapter_config.json says."""

ATTENTION_WITHOUT_MASK = ("auto", "flash_attention_2", "flash_attention_3")
"""Values of `model.attention` that are told where samples begin and need no mask of the whole row."""

LAYOUT, PADDING_FREE = "batches", "padding-free"
"""What a checkpoint records where samples share rows that older versions padded."""


def resolve_padding_free(config: RunConfig, *, model: Any = None, adapter: AdapterConfig = None) -> DataSection:
    """Return `data:` with `padding_free: auto` resolved, the same on every rank.

    It depends on the job, on the model's config and on the checkpoint that the run resumes from: a resumed run lays
    its samples out as before, also where only newer versions know the model. `model` is the config of a model in place
    of the job's, with the adapter beside it.
    """
    data = config.data
    if data.batching.padding_free != "auto":
        return data
    is_free = data.batching.by != "packs" and can_share_rows(config, model=model, adapter=adapter)
    return data.model_copy(update={"batching": data.batching.model_copy(update={"padding_free": is_free})})


def format_padding_free(config: RunConfig, data: DataSection) -> tuple[str, ...]:
    """Return what `auto` has come to and why, where the task leaves a choice."""
    if config.task.name in PADDED_TASKS or config.data.batching.padding_free != "auto" or data.batching.by == "packs":
        return ()
    if data.batching.padding_free is True:
        return ("padding-free batches: the model keeps the samples of a row apart",)
    return (f"samples are padded: {why_padded(config)}",)


def can_share_rows(config: RunConfig, *, model: Any = None, adapter: AdapterConfig = None) -> bool:
    """Tell whether samples may share one row without a proof by the model itself."""
    return why_padded(config, model=model, adapter=adapter) is None


def why_padded(config: RunConfig, *, model: Any = None, adapter: AdapterConfig = None) -> str | None:
    """Return why samples are padded where the user leaves the choice; None where they share rows."""
    attention = config.model.attention
    if config.task.name in PADDED_TASKS:
        return f"`task: {config.task.name}` pads"
    if attention not in ATTENTION_WITHOUT_MASK:
        return f"`model.attention: {attention}` needs a mask of the whole row. Write `auto`"
    if _has_prompt_adapter(config, adapter):
        return "samples in one row would share what the adapter prepends to the text"
    try:
        own = load_model_config(config.model) if model is None else model
    except ModelError:
        return "the model cannot be loaded"  # which is said where it is loaded
    if (reason := padding_reason(own)) is not None:
        return reason
    if needs_own_attention(own) and attention != "auto":
        return f"`model.attention: {attention}` does not keep samples of this model apart. Write `auto`"
    if model is None and was_once_padded(own) and _resumes_padded(config):
        return (
            "the checkpoint that the run resumes from is of a run that padded them. To pack them from here on, which "
            "changes losses within rounding and dropout, write `data.batching.padding_free: true`"
        )
    return None


def recorded_layout(config: RunConfig) -> Mapping[str, str]:
    """Return what checkpoints of this run record about its layout; nothing where every version has the same."""
    batching = resolve_padding_free(config).batching
    if batching.padding_free is not True or not was_once_padded(load_model_config(config.model)):
        return {}
    return {LAYOUT: PADDING_FREE}


def _resumes_padded(config: RunConfig) -> bool:
    """Tell whether the run resumes from a checkpoint whose run, in an older version, padded its samples."""
    resume = config.checkpoint.resume
    if resume == "never" or is_url(config.run.folder) or is_url(resume):
        return False
    newest = layout.newest_checkpoint(Path(config.run.folder) / CHECKPOINTS_FOLDER)
    path = newest if resume == "auto" else Path(resume)
    try:
        return path is not None and read_manifest_of_step(path).run.origin.get(LAYOUT) != PADDING_FREE
    except (CheckpointError, OSError):
        return False  # which is said where it is resumed from


def _has_prompt_adapter(config: RunConfig, adapter: AdapterConfig) -> bool:
    """Tell whether something is learned before the text, which samples in one row would share."""
    if adapter is None and config.model.adapter is not None:
        path = Path(config.model.adapter).expanduser() / ADAPTER_CONFIG
        adapter = read_adapter_config(path.parent) if path.is_file() else None
    kind = adapter_of(config) if adapter is None else str(adapter.get("peft_type", "")).lower()
    return kind in PROMPT_ADAPTERS
