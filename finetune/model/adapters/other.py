"""The other adapters of peft: their config is made from the values in the job."""

import dataclasses
import inspect
from difflib import get_close_matches
from typing import Any

from peft import PeftConfig, PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import PreTrainedModel

from finetune.config.sections.model import PeftSection
from finetune.errors import ModelError
from finetune.model.adapters.context import TASK_TYPES, AdapterContext, check_module_names
from finetune.model.loading.architecture import new_head_modules
from finetune.registry.adapters import PEFT_TYPES

_KEY = "model.peft"


def peft_config(model: PreTrainedModel, section: PeftSection, context: AdapterContext) -> PeftConfig:
    """Return peft's config of this type; raises ModelError for an unknown type, value or module."""
    classes = {str(kind.value).lower(): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if section.type not in classes:
        known = sorted(name for name in classes if name not in PEFT_TYPES or not PEFT_TYPES[name].refusal)
        near = get_close_matches(section.type, known, n=1)
        hint = f"Did you mean `{near[0]}`?" if near else f"It has {', '.join(known)}."
        raise ModelError(f"{_KEY}.type: the installed peft has no `{section.type}`. {hint}")
    config_class: Any = classes[section.type]
    arguments = {field.name for field in dataclasses.fields(config_class)}
    for name in section.values:
        if name not in arguments:
            near = get_close_matches(name, arguments, n=1)
            hint = f"Did you mean `{near[0]}`?" if near else f"It has {', '.join(sorted(arguments))}."
            raise ModelError(f"{_KEY}.values: {config_class.__name__} has no `{name}`. {hint}")
    targets = section.values.get("target_modules")
    if isinstance(targets, list):
        check_module_names(model, targets, key=f"{_KEY}.values.target_modules")
    values = {**section.values, "task_type": TASK_TYPES.get(context.head)}
    if section.type == "vera":  # peft draws the projections again from `projection_prng_key`, the same on every machine
        values = {"save_projection": False, **values}
    if "modules_to_save" in inspect.signature(config_class).parameters:
        heads = list(new_head_modules(model, head=context.head))
        values["modules_to_save"] = [*(section.values.get("modules_to_save") or ()), *heads] or None
    try:
        config: PeftConfig = config_class(**values)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{_KEY}.values: {error}") from error
    if config.is_prompt_learning:
        raise ModelError(f"{_KEY}.type: `{section.type}` trains virtual tokens. Write `model.prompt_tuning`.")
    return config


def require_trained(model: PeftModel, section: PeftSection, context: AdapterContext) -> None:
    """Raise ModelError where the adapter has no trained parameters."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"{_KEY}: `{section.type}` with these values trains nothing. Write its `target_modules`.")
