"""The weights and config of an adapter of any type, as plain peft loads them."""

import copy
import re
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor

from finetune.export.weights import build_meta_model, check_shapes, unwrap_adapter
from finetune.model.adapters.build import peft_state_dict_names
from finetune.model.adapters.context import ADAPTER_NAME, base_parameter_name
from finetune.model.adapters.lora import as_plain_lora, initial_factors
from finetune.model.adapters.targets import shortest_names
from finetune.model.adapters.upstream import is_parameter_wrapper, keep_targets, rewritten_names


def adapter_for_export(
    model: PeftModel, weights: Mapping[str, Tensor], *, dtype: torch.dtype
) -> tuple[dict[str, Tensor], PeftConfig]:
    """Return the adapter's weights under peft's names, all of them checked, and its config.

    If initialization changed the base (PiSSA, OLoRA) and the original base is elsewhere, the adapter is converted to
    one on the original. Raises TrainingError for a weight that is missing or empty.
    """
    config = copy.deepcopy(model.peft_config[ADAPTER_NAME])
    _check(weights, model, config, dtype=dtype)
    initial = initial_factors(model)
    if initial and unwrap_adapter(model).name_or_path:
        weights, config = as_plain_lora(weights, config, initial)
    elif initial:
        config.init_lora_weights = True  # the changed base is exported next to the adapter
    meta_model, names = _check(weights, model, config, dtype=dtype)
    config = loadable_config(meta_model, config)
    config.inference_mode = True
    return {peft_name: weights[name].contiguous() for name, peft_name in names.items()}, config


def base_weights(model: PeftModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the base's weights under the names they had before peft wrapped the modules."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if model.peft_config[ADAPTER_NAME].is_prompt_learning:
        # wraps none of the base's modules except a new head
        names = {name: name.removeprefix("base_model.").replace(".original_module.", ".") for name in weights}
    else:
        names = {name: base_parameter_name(name) for name in weights}
    return {names[name]: tensor for name, tensor in weights.items() if name not in trained}


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
        config.init_lora_weights = True  # other initializations read values, which the meta device lacks
    base = build_meta_model(unwrap_adapter(model), dtype=dtype)
    # BOFT reads the permutations that it computes from sizes
    device = nullcontext() if config.peft_type == "BOFT" else torch.device("meta")
    with device, keep_targets():
        return get_peft_model(base, config, low_cpu_mem_usage=True)


def loadable_config(model: PeftModel, config: Any) -> Any:
    """Return the config, changed so that plain peft adapts the same modules when it loads the adapter.

    On loading, peft replaces some module names with parameters of routed experts (`rewritten_names`). Shared experts
    and dense layers with these names are therefore targeted as parameters, `shared_experts.up_proj.weight`, with the
    same result and tensor names. Adapters of parameters cannot have dropout, which only matters in training.
    """
    if config.peft_type != "LORA":
        return config
    config = copy.deepcopy(config)
    base = model.get_base_model()
    rewritten = rewritten_names(base.config.model_type)
    layers = {
        base_parameter_name(f"{name}.").removesuffix("."): module
        for name, module in base.named_modules()
        if isinstance(module, LoraLayer) and not is_parameter_wrapper(module)
    }
    moved = {name: layer for name, layer in layers.items() if name.rpartition(".")[2] in rewritten}
    parameters = [base_parameter_name(name) for name, _ in base.named_parameters() if ".lora_" not in name]
    if moved:
        names = {base_parameter_name(f"{name}.").removesuffix(".") for name, _ in base.named_modules()}
        others = [name for name in layers if name not in moved]
        config.target_modules = shortest_names(others, {name for name in names if "lora_" not in name})
        config.layers_to_transform = None
        for name, layer in moved.items():
            parameter = re.escape(f"{name}.weight")  # recorded if its rank or alpha differs
            if layer.r[ADAPTER_NAME] != config.r:
                config.rank_pattern = {parameter: layer.r[ADAPTER_NAME], **config.rank_pattern}
            if layer.lora_alpha[ADAPTER_NAME] != config.lora_alpha:
                config.alpha_pattern = {parameter: layer.lora_alpha[ADAPTER_NAME], **config.alpha_pattern}
    targets = {*(config.target_parameters or ()), *(f"{name}.weight" for name in moved)}
    if targets:
        suffixes = tuple(f".{name}" for name in targets)
        targeted = [name for name in parameters if name in targets or name.endswith(suffixes)]
        config.target_parameters = shortest_names(targeted, parameters)
        config.lora_dropout = 0.0
    return config
