"""Adapters that multiply: learnt scales (IA3) and rotations (OFT)."""

from peft import IA3Config, OFTConfig, PeftModel
from peft.tuners.oft import OFTLayer
from transformers import PreTrainedModel

from finetune.config.sections.model import Ia3Section, OftSection
from finetune.errors import ModelError
from finetune.model.adapters.ground import Ground
from finetune.model.adapters.names import ADAPTER, TASK_TYPES, check_each, is_transposed
from finetune.model.heads import head_modules
from finetune.model.unread import excluded


def ia3_config(model: PreTrainedModel, ia3: Ia3Section, ground: Ground) -> IA3Config:
    """Return peft's config; raises ModelError for a module that the model does not have."""
    check_each(model, ia3.target_modules, key="model.ia3.target_modules")
    is_written = bool(ia3.target_modules)
    return IA3Config(
        target_modules=list(ia3.target_modules) if is_written else None,
        feedforward_modules=list(ia3.feedforward_modules) if is_written else None,
        modules_to_save=list(head_modules(model, head=ground.head)) or None,
        fan_in_fan_out=any(map(is_transposed, model.modules())),
        task_type=TASK_TYPES.get(ground.head),
    )


def oft_config(model: PreTrainedModel, oft: OftSection, ground: Ground) -> OFTConfig:
    """Return peft's config; raises ModelError for a module that the model does not have."""
    if not isinstance(oft.target_modules, str):
        check_each(model, oft.target_modules, key="model.oft.target_modules")
    return OFTConfig(
        r=0,
        oft_block_size=oft.block_size,
        module_dropout=oft.dropout,
        target_modules=oft.target_modules if isinstance(oft.target_modules, str) else list(oft.target_modules),
        exclude_modules=excluded(model),
        modules_to_save=list(head_modules(model, head=ground.head)) or None,
        bias="none",
        task_type=TASK_TYPES.get(ground.head),
    )


def check_oft(model: PeftModel, oft: OftSection) -> None:
    """Refuse blocks that do not divide a layer's inputs, for which peft would take others; raises ModelError."""
    for name, module in model.named_modules():
        if isinstance(module, OFTLayer) and module.oft_block_size[ADAPTER] != oft.block_size:
            raise ModelError(
                f"model.oft.block_size: blocks of {oft.block_size} do not divide the {module.in_features} inputs of "
                f"`{name.removeprefix('base_model.model.')}`. Write a divisor, such as "
                f"{module.oft_block_size[ADAPTER]}, or fewer `model.oft.target_modules`."
            )
