"""The weights and config of an adapter of any kind, as plain peft loads them."""

import copy
from collections.abc import Mapping

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor

from finetune.export.merge import base_parameter_name
from finetune.export.weights import ADAPTER_NAME, build_meta_model, check_shapes, unwrap_adapter
from finetune.model.adapters.build import peft_state_dict_names
from finetune.model.adapters.lora import as_plain_lora, initial_factors


def adapter_for_export(
    model: PeftModel, weights: Mapping[str, Tensor], *, dtype: torch.dtype
) -> tuple[dict[str, Tensor], PeftConfig]:
    """Return the adapter's weights as peft names them, all of them checked, and its config.

    Where the base was altered (PiSSA, OLoRA) and the original is elsewhere, they mean on the original what was trained
    on the altered one. Raises TrainingError for a weight that is missing or empty.
    """
    config = copy.deepcopy(model.peft_config[ADAPTER_NAME])
    _check(weights, model, config, dtype=dtype)
    first = initial_factors(model)
    if first and unwrap_adapter(model).name_or_path:
        weights, config = as_plain_lora(weights, config, first)
    elif first:
        config.init_lora_weights = True  # the base that is written with it is the altered one
    names = _check(weights, model, config, dtype=dtype)
    config.inference_mode = True
    return {written: weights[name].contiguous() for name, written in names.items()}, config


def base_weights(model: PeftModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the base's weights under the names they had before peft wrapped their modules."""
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if model.peft_config[ADAPTER_NAME].is_prompt_learning:
        names = {name: _base_name(name) for name in weights}
    else:
        names = {name: base_parameter_name(name) for name in weights}
    return {names[name]: tensor for name, tensor in weights.items() if name not in learning}


def _base_name(name: str) -> str:
    """Return the base's own name: learnt prompts leave its modules as they are, but for a new head."""
    return name.removeprefix("base_model.").replace(".original_module.", ".")


def _check(
    weights: Mapping[str, Tensor], model: PeftModel, config: PeftConfig, *, dtype: torch.dtype
) -> dict[str, str]:
    """Return the written name of each weight that is trained; raises TrainingError unless all of them are whole."""
    skeleton = _build_meta_peft_model(model, config, dtype=dtype)
    trained = {name: place for name, place in skeleton.named_parameters() if place.requires_grad}
    check_shapes(weights, {name: place.shape for name, place in trained.items()})
    return peft_state_dict_names(skeleton, trained)


def _build_meta_peft_model(model: PeftModel, config: PeftConfig, *, dtype: torch.dtype) -> PeftModel:
    """Return a model with adapters of this config whose parameters have shapes and no memory."""
    config = copy.deepcopy(config)
    config.base_model_name_or_path = None
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # others would look at values, and there are none
    base = build_meta_model(unwrap_adapter(model), dtype=dtype)
    with torch.device("meta"):
        return get_peft_model(base, config, low_cpu_mem_usage=True)
