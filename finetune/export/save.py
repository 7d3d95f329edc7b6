"""Write the model that a run leaves behind: whole, checked, and loadable without this package."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from finetune.config.sections.export import ExportSection
from finetune.export.card import CardBase, CardFacts, write_card
from finetune.export.completeness import check_files, check_shapes, complete_weights
from finetune.export.folder import replaced
from finetune.export.generation import Inputs, generation_config
from finetune.export.skeleton import ADAPTER, adapted_skeleton, base_skeleton, plain_base

ADAPTER_FILE = "adapter_model.safetensors"
BASE_FOLDER = "base"
BASE_PREFIX = "base_model.model."


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
    model: PreTrainedModel | PeftModel,
    weights: Mapping[str, Tensor],
    inputs: Inputs,
    section: ExportSection,
    facts: CardFacts,
) -> ExportReport:
    """Write model or adapter, tokenizer, generation config and card into `folder`, which appears whole or not at all.

    `model` tells class and config and is not asked for values: those are `weights`, full CPU tensors by canonical name.
    An adapter on a base that was built from its config brings the base along in `base/`; `adapter_config.json` then
    holds that folder's absolute path, so after moving `folder` load the base from there first, as the card shows.
    Raises TrainingError when a weight is missing or empty, before or after writing. No collective: call it on the main
    process alone.
    """
    weights = _cast(weights, section.dtype)
    with replaced(folder) as staging:
        if isinstance(model, PeftModel):
            counts = _write_adapter(staging, folder, model=model, weights=weights, inputs=inputs, section=section)
            base = CardBase(plain_base(model).name_or_path or None)
        else:
            counts = _write_model(staging, model=model, weights=weights, inputs=inputs, section=section)
            base = None
        inputs.save(staging)
        (staging / "README.md").write_text(write_card(facts, base=base), encoding="utf-8")
    files = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))
    return ExportReport(folder, files, num_tensors=counts[0], size_bytes=counts[1])


def _write_model(
    folder: Path,
    *,
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    inputs: Inputs,
    section: ExportSection,
) -> tuple[int, int]:
    skeleton = base_skeleton(model, dtype=_dtype(weights))
    complete = complete_weights(skeleton, weights)
    if _generates(model) and inputs.language is not None:
        skeleton.generation_config = generation_config(model.generation_config, inputs.language)
    skeleton.save_pretrained(folder, state_dict=dict(complete), max_shard_size=section.max_shard_size)
    return check_files(folder, complete)


def _generates(model: PreTrainedModel) -> bool:
    """Tell whether the model answers: one with a head of classes has no generation config."""
    return getattr(model, "generation_config", None) is not None and bool(model.can_generate())


def _write_adapter(
    staging: Path,
    folder: Path,
    *,
    model: PeftModel,
    weights: Mapping[str, Tensor],
    inputs: Inputs,
    section: ExportSection,
) -> tuple[int, int]:
    adapter = _adapter_weights(model, weights)
    base = plain_base(model)
    config = copy.deepcopy(model.peft_config[ADAPTER])
    config.inference_mode = True
    config.base_model_name_or_path = base.name_or_path or str(folder.absolute() / BASE_FOLDER)
    save_file(adapter, staging / ADAPTER_FILE, metadata={"format": "pt"})
    config.save_pretrained(staging)
    if _generates(base) and inputs.language is not None:
        generation_config(base.generation_config, inputs.language).save_pretrained(staging)
    num_tensors, size_bytes = check_files(staging, adapter)
    if base.name_or_path:
        return num_tensors, size_bytes
    beneath = staging / BASE_FOLDER
    counts = _write_model(beneath, model=base, weights=_base_weights(weights), inputs=inputs, section=section)
    inputs.save(beneath)
    return num_tensors + counts[0], size_bytes + counts[1]


def _adapter_weights(model: PeftModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapter's weights under the names that peft reads, all of them checked."""
    skeleton = adapted_skeleton(model, dtype=_dtype(weights))
    check_shapes(weights, {name: place.shape for name, place in skeleton.named_parameters() if _is_adapter(name)})
    expected = get_peft_model_state_dict(skeleton, save_embedding_layers=False)
    given = get_peft_model_state_dict(skeleton, state_dict=dict(weights), save_embedding_layers=False)
    check_shapes(given, {name: place.shape for name, place in expected.items()})
    return {name: given[name].contiguous() for name in expected}


def _is_adapter(name: str) -> bool:
    return ".lora_" in name or f".modules_to_save.{ADAPTER}." in name


def _base_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the base's weights under the names they had before peft wrapped their modules."""
    base = {}
    for name, tensor in weights.items():
        if not _is_adapter(name):
            plain = name.removeprefix(BASE_PREFIX).replace(".base_layer.", ".").replace(".original_module.", ".")
            base[plain] = tensor
    return base


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
