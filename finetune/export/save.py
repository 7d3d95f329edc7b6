"""Writes the trained model: complete, checked, and loadable without this package."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from finetune.config.sections.export import ExportSection
from finetune.export.card import CardBase, CardFacts, write_card
from finetune.export.weights import ADAPTER_NAME, build_meta_model, check_files, complete_weights, unwrap_adapter
from finetune.model.adapters.context import has_adapter
from finetune.model.loading.architecture import NEW_HEADS
from finetune.model.loading.saved import CONFIG_FOLDER
from finetune.runtime.files.atomic import replace_folder
from finetune.runtime.optional import lazily
from finetune.runtime.text.terminal import printable

with lazily():
    from finetune.export import adapter as adapters
    from finetune.export import merge as merging


@dataclass(frozen=True)
class TextPreprocessor:
    """How text becomes tokens, and the tokens that end an answer."""

    tokenizer: PreTrainedTokenizerBase
    stop_ids: Collection[int]


@dataclass(frozen=True)
class Preprocessors:
    """What the model's inputs are made with; images alone have no language, text alone has no processor."""

    language: TextPreprocessor | None
    processor: Any = None

    def save(self, folder: Path) -> None:
        """Write tokenizer and processor into the folder, so that transformers loads them from there."""
        for part in (self.language.tokenizer if self.language else None, self.processor):
            if part is not None:
                part.save_pretrained(folder)


def generation_config(original: GenerationConfig, language: TextPreprocessor) -> GenerationConfig:
    """Return the model's own settings with the tokenizer's ids: every token that ends an answer ends the generation.

    Settings that contradict one another, which transformers refuses to save, are left out.
    """
    config = copy.deepcopy(original)
    try:
        config.validate(strict=True)
    except ValueError:
        config = GenerationConfig()
    stops = sorted(language.stop_ids)
    config.bos_token_id = language.tokenizer.bos_token_id
    config.eos_token_id = stops[0] if len(stops) == 1 else stops or None
    config.pad_token_id = language.tokenizer.pad_token_id
    return config


ADAPTER_FILE = "adapter_model.safetensors"
BASE_FOLDER = "base"


@dataclass(frozen=True)
class ExportReport:
    """What was written; `files` are relative to `folder`."""

    folder: Path
    files: tuple[str, ...]
    num_tensors: int
    size_bytes: int


def export_model(
    folder: Path,
    *,
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    preprocessors: Preprocessors,
    section: ExportSection,
    facts: CardFacts,
) -> ExportReport:
    """Write model or adapter, tokenizer, generation config and card into `folder`, which appears whole or not at all.

    `model` tells class and config and is not asked for values: those are `weights`, full CPU tensors by canonical name.
    An adapter on a base that was built from its config brings the base along in `base/`; `adapter_config.json` then
    holds that folder's absolute path, so after moving `folder` load the base from there first, as the card shows.
    With `export.merge` the adapter becomes part of the base, for which `weights` must hold the base's, too; the result
    is a whole model. Raises TrainingError when a weight is missing or empty, before or after writing. No collective:
    call it on the main process alone.
    """
    with replace_folder(folder) as staging:
        if has_adapter(model) and section.merge:
            counts = _write_merged(staging, model=model, weights=weights, preprocessors=preprocessors, section=section)
        elif has_adapter(model):
            weights = _cast(weights, section.dtype)
            counts = _write_adapter(
                staging, folder, model=model, weights=weights, preprocessors=preprocessors, section=section
            )
            if (
                facts.head in NEW_HEADS and unwrap_adapter(model).name_or_path
            ):  # the base knows nothing of these classes
                unwrap_adapter(model).config.save_pretrained(staging / CONFIG_FOLDER)
        else:
            weights = _cast(weights, section.dtype)
            counts = _write_model(staging, model=model, weights=weights, preprocessors=preprocessors, section=section)
        preprocessors.save(staging)
        base = card_base(model, is_merged=section.merge, head=facts.head)
        (staging / "README.md").write_text(printable(write_card(facts, base=base)), encoding="utf-8")
    files = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))
    return ExportReport(folder, files, num_tensors=counts[0], size_bytes=counts[1])


def card_base(model: PreTrainedModel, *, is_merged: bool, head: str) -> CardBase | None:
    """Return what the card says of the model's origin; None where it began with random weights."""
    base = unwrap_adapter(model)
    name = base.name_or_path or None
    if has_adapter(model) and not is_merged:
        size = base.config.get_text_config().vocab_size if _brings_embeddings(model) else None
        has_own_config = head in NEW_HEADS and name is not None
        return CardBase(name, has_own_config=has_own_config, num_embeddings=size)
    was_merged = has_adapter(model)
    return CardBase(name, "finetune", was_merged=was_merged) if name is not None or was_merged else None


def _brings_embeddings(model: Any) -> bool:
    """Tell whether the adapter holds rows of the embeddings, which may be more than the base has."""
    config = model.peft_config[ADAPTER_NAME]
    names = {name for name, module in unwrap_adapter(model).named_modules() if isinstance(module, nn.Embedding)}
    saved = getattr(config, "modules_to_save", None) or ()
    return bool(getattr(config, "trainable_token_indices", None)) or any(
        name == each or name.endswith(f".{each}") for name in names for each in saved
    )


def _write_model(
    folder: Path,
    *,
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    preprocessors: Preprocessors,
    section: ExportSection,
    untie: bool = False,
) -> tuple[int, int]:
    skeleton = build_meta_model(model, dtype=_dtype(weights), is_untied=untie)
    complete = complete_weights(skeleton, weights)
    if _generates(model) and preprocessors.language is not None:
        skeleton.generation_config = generation_config(model.generation_config, preprocessors.language)
    skeleton.save_pretrained(folder, state_dict=dict(complete), max_shard_size=section.max_shard_size)
    return check_files(folder, complete)


def _write_merged(
    folder: Path,
    *,
    model: Any,
    weights: Mapping[str, Tensor],
    preprocessors: Preprocessors,
    section: ExportSection,
) -> tuple[int, int]:
    merged = merging.merge(model, weights, dtype=getattr(torch, section.dtype) if section.dtype else None)
    return _write_model(
        folder,
        model=unwrap_adapter(model),
        weights=merged.weights,
        preprocessors=preprocessors,
        section=section,
        untie=merged.has_untied_weights,
    )


def _generates(model: PreTrainedModel) -> bool:
    """Tell whether the model answers: one with a head of classes has no generation config."""
    return getattr(model, "generation_config", None) is not None and bool(model.can_generate())


def _write_adapter(
    staging: Path,
    folder: Path,
    *,
    model: Any,
    weights: Mapping[str, Tensor],
    preprocessors: Preprocessors,
    section: ExportSection,
) -> tuple[int, int]:
    adapter, config = adapters.adapter_for_export(model, weights, dtype=_dtype(weights))
    base = unwrap_adapter(model)
    config.base_model_name_or_path = base.name_or_path or str(folder.absolute() / BASE_FOLDER)
    save_file(adapter, staging / ADAPTER_FILE, metadata={"format": "pt"})
    config.save_pretrained(staging)
    if _generates(base) and preprocessors.language is not None:
        generation_config(base.generation_config, preprocessors.language).save_pretrained(staging)
    num_tensors, size_bytes = check_files(staging, adapter)
    if base.name_or_path:
        return num_tensors, size_bytes
    beneath = staging / BASE_FOLDER
    counts = _write_model(
        beneath, model=base, weights=adapters.base_weights(model, weights), preprocessors=preprocessors, section=section
    )
    preprocessors.save(beneath)
    return num_tensors + counts[0], size_bytes + counts[1]


def _cast(weights: Mapping[str, Tensor], dtype: str | None) -> Mapping[str, Tensor]:
    if dtype is None:
        return weights
    kind = getattr(torch, dtype)
    return {name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def _dtype(weights: Mapping[str, Tensor]) -> torch.dtype:
    """Return the type of most weights, which is what `config.json` will say."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in weights.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
