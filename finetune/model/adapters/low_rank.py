"""LoRA adapters (Hu et al., 2021, arXiv:2106.09685) and their variants."""

import re
from typing import Any

from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from finetune.config.sections.model import LoraSection
from finetune.errors import ModelError
from finetune.model.adapters.ground import Ground
from finetune.model.adapters.names import TASK_TYPES, check_each, is_transposed, name_of
from finetune.model.heads import head_modules
from finetune.model.unread import excluded

OF_THE_BASE = ("pissa", "olora")
"""First values that are taken out of the base's weights, which is then another base."""

_AT_FIRST = {"default": True, "gaussian": "gaussian", "pissa": "pissa", "olora": "olora", "loftq": True}


def lora_config(model: PreTrainedModel, lora: LoraSection, ground: Ground) -> LoraConfig:
    """Return peft's config; raises ModelError for a target or module that the model does not have."""
    if not isinstance(lora.target_modules, str):
        check_each(model, lora.target_modules, key="model.lora.target_modules")
    check_each(model, lora.modules_to_save, key="model.lora.modules_to_save")
    if lora.init == "olora" and any(map(is_transposed, model.modules())):
        raise ModelError(
            "model.lora.init: peft's `olora` does not know layers that hold their weight the other way round, as this "
            "model's do. Write `pissa` or `default`."
        )
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_targets(model, lora, head=ground.head),
        exclude_modules=excluded(model),
        modules_to_save=[*lora.modules_to_save, *head_modules(model, head=ground.head)] or None,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        init_lora_weights=_first_values(lora, ground),
        layers_to_transform=list(lora.layers) or None,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        trainable_token_indices=_new_rows(model, lora, ground) or None,
        bias="none",
        fan_in_fan_out=any(map(is_transposed, model.modules())),
        task_type=TASK_TYPES.get(ground.head),
    )


def check_lora(model: PeftModel, lora: LoraSection) -> None:
    """Refuse layers and patterns that have met no adapter, which peft says nothing of; raises ModelError."""
    names = [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    found = {int(number) for name in names for number in re.findall(r"\.(\d+)\.", name)}
    absent = [number for number in lora.layers if number not in found]
    if absent:
        raise ModelError(
            f"model.lora.layers: no adapter is on layer {', '.join(map(str, absent))}. "
            "Layers are counted from 0, and what they hold has to be in `model.lora.target_modules`."
        )
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, key):
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
                ends = sorted({name.rpartition(".")[2] for name in names})
                raise ModelError(
                    f"model.lora.{key}: no module with an adapter has a name that ends with `{pattern}`. "
                    f"Names end with {', '.join(ends)}."
                )


def _targets(model: PreTrainedModel, lora: LoraSection, *, head: str) -> str | list[str]:
    """Return peft's words for the targets; it takes no layers beside `all-linear`, so these are spelled out."""
    if not isinstance(lora.target_modules, str):
        return list(lora.target_modules)
    if not lora.layers:
        return lora.target_modules
    heads = (name_of(model.get_output_embeddings(), model), *head_modules(model, head=head))
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if (isinstance(module, nn.Linear) or is_transposed(module)) and name not in heads
        }
    )


def _first_values(lora: LoraSection, ground: Ground) -> Any:
    """Return peft's word; a rank that is sent its weights later takes nothing out of places without values."""
    return True if ground.construction.is_hollow and lora.init in OF_THE_BASE else _AT_FIRST[lora.init]


def _new_rows(model: PreTrainedModel, lora: LoraSection, ground: Ground) -> dict[str, list[int]]:
    """Return the rows of embeddings and head that learn because their tokens are new; none where all of them do."""
    if not ground.new_ids:
        return {}
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = outputs is not None and inputs.weight is outputs.weight
    names = [name_of(module, model) for module in ((inputs,) if is_tied else (inputs, outputs))]
    saved = (*lora.modules_to_save, *head_modules(model, head=ground.head))
    return {
        name: list(ground.new_ids)
        for name in names
        if name is not None and not any(name == each or name.endswith(f".{each}") for each in saved)
    }
