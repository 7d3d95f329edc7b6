"""The config of a LoRA adapter as it is saved, so that plain peft adds the same adapters to the base."""

import copy
import re
from typing import Any

from peft import PeftModel
from peft.tuners.lora import LoraLayer

from finetune.model.adapters.context import ADAPTER_NAME, base_parameter_name
from finetune.model.adapters.targets import shortest_names
from finetune.model.adapters.upstream import is_parameter_wrapper, rewritten_names


def loadable_config(model: PeftModel, config: Any) -> Any:
    """Return the config, changed where plain peft would adapt something else than the model's adapters.

    On loading, peft replaces some names of modules by parameters of routed experts (`rewritten_names`). Shared experts
    and dense layers of these names are therefore saved as parameters, `shared_experts.up_proj.weight`: the same sum,
    under the same names of tensors. Adapters of parameters cannot have dropout, which matters to training alone.
    """
    if config.peft_type != "LORA":
        return config
    config = copy.deepcopy(config)
    base = model.get_base_model()
    rewritten = rewritten_names(base.config.model_type)
    layers = {
        base_parameter_name(f"{name}."): each
        for name, each in base.named_modules()
        if isinstance(each, LoraLayer) and not is_parameter_wrapper(each)
    }
    layers = {name.removesuffix("."): each for name, each in layers.items()}
    moved = {name: each for name, each in layers.items() if name.rpartition(".")[2] in rewritten}
    parameters = [base_parameter_name(name) for name, _ in base.named_parameters() if ".lora_" not in name]
    if moved:
        names = {base_parameter_name(f"{name}.").removesuffix(".") for name, _ in base.named_modules()}
        others = [name for name in layers if name not in moved]
        config.target_modules = shortest_names(others, {name for name in names if "lora_" not in name})
        config.layers_to_transform = None
        for name, layer in moved.items():
            _keep_rank(config, f"{name}.weight", layer)
    wanted = {*(config.target_parameters or ()), *(f"{name}.weight" for name in moved)}
    if wanted:
        ends = tuple(f".{name}" for name in wanted)
        chosen = [name for name in parameters if name in wanted or name.endswith(ends)]
        config.target_parameters = shortest_names(chosen, parameters)
        config.lora_dropout = 0.0
    return config


def _keep_rank(config: Any, parameter: str, layer: Any) -> None:
    """Record rank and alpha of the layer for its parameter where they are not those of most layers."""
    rank, alpha = layer.r[ADAPTER_NAME], layer.lora_alpha[ADAPTER_NAME]
    if rank != config.r:
        config.rank_pattern = {re.escape(parameter): rank, **config.rank_pattern}
    if alpha != config.lora_alpha:
        config.alpha_pattern = {re.escape(parameter): alpha, **config.alpha_pattern}
