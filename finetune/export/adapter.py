"""The weights and config of an adapter of any kind, as plain peft loads them."""

import copy
from collections.abc import Mapping

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor

from finetune.export.weights import build_meta_model, check_shapes, unwrap_adapter
from finetune.model.adapters.build import peft_state_dict_names
from finetune.model.adapters.context import ADAPTER_NAME, base_parameter_name
from finetune.model.adapters.lora import as_plain_lora, initial_factors
from finetune.model.adapters.saved_config import loadable_config
from finetune.model.adapters.upstream import keep_targets


def adapter_for_export(
    model: PeftModel, weights: Mapping[str, Tensor], *, dtype: torch.dtype
) -> tuple[dict[str, Tensor], PeftConfig]:
    """Return the adapter's weights under peft's names, all of them checked, and its config.

    If initialisation changed the base (PiSSA, OLoRA) and the original base is elsewhere, the adapter is converted to
    one on the original. Raises TrainingError for a weight that is missing or empty.
    """
    config = copy.deepcopy(model.peft_config[ADAPTER_NAME])
    _check(weights, model, config, dtype=dtype)
    initial = initial_factors(model)
    if initial and unwrap_adapter(model).name_or_path:
        weights, config = as_plain_lora(weights, config, initial)
    elif initial:
        config.init_lora_weights = True  # the changed base is exported beside the adapter
    meta_model, names = _check(weights, model, config, dtype=dtype)
    config = loadable_config(meta_model, config)
    config.inference_mode = True
    return {peft_name: weights[name].contiguous() for name, peft_name in names.items()}, config


def base_weights(model: PeftModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the base's weights under the names they had before peft wrapped the modules."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if model.peft_config[ADAPTER_NAME].is_prompt_learning:
        names = {name: _base_name(name) for name in weights}
    else:
        names = {name: base_parameter_name(name) for name in weights}
    return {names[name]: tensor for name, tensor in weights.items() if name not in trained}


def _base_name(name: str) -> str:
    """Return the base's own name: prompt learning wraps none of its modules except a new head."""
    return name.removeprefix("base_model.").replace(".original_module.", ".")


def _check(
    weights: Mapping[str, Tensor], model: PeftModel, config: PeftConfig, *, dtype: torch.dtype
) -> tuple[PeftModel, dict[str, str]]:
    """Return the adapted model without values, and peft's name of each trained weight.

    Raises TrainingError unless all have their full shape.
    """
    meta_model = _build_meta_peft_model(model, config, dtype=dtype)
    trained = {name: parameter for name, parameter in meta_model.named_parameters() if parameter.requires_grad}
    check_shapes(weights, {name: parameter.shape for name, parameter in trained.items()})
    return meta_model, peft_state_dict_names(meta_model, trained)


def _build_meta_peft_model(model: PeftModel, config: PeftConfig, *, dtype: torch.dtype) -> PeftModel:
    """Return a model with an adapter of this config on the meta device."""
    config = copy.deepcopy(config)
    config.base_model_name_or_path = None
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # other initialisations read values, which the meta device lacks
    base = build_meta_model(unwrap_adapter(model), dtype=dtype)
    with torch.device("meta"), keep_targets():
        return get_peft_model(base, config, low_cpu_mem_usage=True)
