"""Padding-free batches: used where the model is known to keep samples apart that share one row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import read_manifest_of_step
from finetune.config.paths import is_url
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import DataSection
from finetune.errors import CheckpointError, ModelError
from finetune.model.attention.supported_models import (
    OWN_ATTENTION_TYPES,
    PACKED_FROM_THE_FIRST,
    padding_reason,
    text_config,
)
from finetune.model.frozen_models import TEACHER_KEY
from finetune.model.loading.architecture import load_model_config
from finetune.model.loading.pretrained import ADAPTER_CONFIG, load_named, read_adapter_config
from finetune.registry.model_choices import ATTENTIONS, is_prompt_type
from finetune.registry.tasks import TASKS
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER

AdapterConfig = Mapping[str, Any] | None
"""The content of an adapter_config.json."""

LAYOUT, PADDING_FREE = "batches", "padding-free"
"""The key in a checkpoint of a run whose samples share rows that older versions padded."""


def resolve_padding_free(config: RunConfig, *, model: Any = None, adapter: AdapterConfig = None) -> DataSection:
    """Return `data:` with `auto` of `padding_free` and `length_window_steps` resolved, the same on every rank.

    It depends on the job, on the model's config and on the checkpoint that the run resumes from: a resumed run lays
    its samples out as before, also where only newer versions know the model. `model` is the config of a model in place
    of the job's, with its adapter.
    """
    data, batching = config.data, config.data.batching
    is_free = batching.padding_free
    if is_free == "auto":
        is_free = batching.by != "packs" and why_padded(config, model=model, adapter=adapter) is None
    steps = batching.length_window_steps
    if steps == "auto":
        is_sorted = batching.by == "samples" and not is_free and TASKS[config.task.name].has_tokens
        steps = 1 if is_sorted else 0
    resolved = {"padding_free": is_free, "length_window_steps": steps}
    return data.model_copy(update={"batching": batching.model_copy(update=resolved)})


def format_padding_free(config: RunConfig, data: DataSection) -> tuple[str, ...]:
    """Return what `auto` has come to and why, where the task leaves a choice."""
    is_chosen = config.data.batching.padding_free != "auto" or data.batching.by == "packs"
    if is_chosen or not TASKS[config.task.name].may_share_rows:
        return ()
    if data.batching.padding_free is True:
        return ("padding-free batches: the model keeps the samples of a row apart",)
    sorting = ", and sorted by length within each step" if data.batching.length_window_steps == 1 else ""
    return (f"samples are padded{sorting}: {why_padded(config)}",)


def why_padded(config: RunConfig, *, model: Any = None, adapter: AdapterConfig = None) -> str | None:
    """Return why samples are padded where the user leaves the choice; None if they share rows."""
    attention = config.model.attention
    if not TASKS[config.task.name].may_share_rows:
        return f"`task: {config.task.name}` pads"
    if ATTENTIONS[attention].masks_whole_rows:
        return f"`model.attention: {attention}` needs a mask of the whole row. Write `auto`"
    if adapter is None and config.model.adapter is not None:
        path = Path(config.model.adapter).expanduser() / ADAPTER_CONFIG
        adapter = read_adapter_config(path.parent) if path.is_file() else None
    if config.model.trains_prompt or is_prompt_type(str((adapter or {}).get("peft_type", "")).lower()):
        return "samples in one row would share what the adapter prepends to the text"
    try:
        own = load_model_config(config.model) if model is None else model
        section = config.task.distillation
        configs = [own]
        if section is not None:
            configs.append(load_named(AutoConfig, section.teacher, key=TEACHER_KEY, section=config.model))
    except ModelError:
        return "the model cannot be loaded"  # loading it raises the error
    if (reason := next(filter(None, map(padding_reason, configs)), None)) is not None:
        return reason
    if text_config(own).model_type in OWN_ATTENTION_TYPES and attention != "auto":
        return f"`model.attention: {attention}` does not keep samples of this model apart. Write `auto`"
    if model is None and _was_once_padded(config.task.name, own) and _resumes_padded(config):
        return (
            "the checkpoint that the run resumes from is of a run that padded them. To pack them from here on, which "
            "changes losses within rounding and dropout, write `data.batching.padding_free: true`"
        )
    return None


def recorded_layout(config: RunConfig) -> Mapping[str, str]:
    """Return the layout that checkpoints of this run record; empty if it is the same in every version."""
    batching = resolve_padding_free(config).batching
    if batching.padding_free is not True or not _was_once_padded(config.task.name, load_model_config(config.model)):
        return {}
    return {LAYOUT: PADDING_FREE}


def _was_once_padded(task: str, own: Any) -> bool:
    """Return whether older versions pad this task, or the samples of this model."""
    return not TASKS[task].may_be_packed or text_config(own).model_type not in PACKED_FROM_THE_FIRST


def _resumes_padded(config: RunConfig) -> bool:
    """Return whether the run resumes from a checkpoint whose run, in an older version, padded its samples."""
    resume = config.checkpoint.resume
    if resume == "never" or is_url(config.run.folder) or is_url(resume):
        return False
    newest = layout.newest_checkpoint(Path(config.run.folder) / CHECKPOINTS_FOLDER)
    path = newest if resume == "auto" else Path(resume)
    try:
        return path is not None and read_manifest_of_step(path).run.origin.get(LAYOUT) != PADDING_FREE
    except (CheckpointError, OSError):
        return False  # resuming raises the error
