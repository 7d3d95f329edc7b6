"""Continues training from a saved adapter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, PromptTuningInit, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from finetune.errors import ModelError
from finetune.model.adapters.context import ADAPTER_NAME, TASK_TYPES, AdapterContext
from finetune.model.loading.hub import loading_errors
from finetune.model.loading.pretrained import ADAPTER_KEY, WEIGHTS_FILE, load_adapter_config, read_saved_adapter_config

_PROMPT_KEY = "prompt_embeddings"


def saved_adapter_config(model: PreTrainedModel, folder: Path, context: AdapterContext) -> PeftConfig:
    """Return the config of the folder's adapter for training; raises ModelError where it does not fit the task."""
    read_saved_adapter_config(folder)
    with loading_errors(str(folder), key=ADAPTER_KEY):
        config: PeftConfig = load_adapter_config(folder)
    expected = TASK_TYPES.get(context.head)
    if config.task_type not in (expected, None):
        raise ModelError(f"{ADAPTER_KEY}: {folder} was trained for {config.task_type}, and this task needs {expected}.")
    config.inference_mode = False
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # the base must not change, however the adapter was initialized
    if hasattr(config, "prompt_tuning_init"):
        config.prompt_tuning_init = PromptTuningInit.RANDOM  # others would load the tokenizer that the config names
    return config


def load_saved_weights(model: PeftModel, folder: Path, context: AdapterContext) -> None:
    """Load the folder's weights into the adapter; raises ModelError for a mismatch. Collective under ZeRO-3."""
    try:
        saved = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{ADAPTER_KEY}: {folder / WEIGHTS_FILE} cannot be read: {error}.") from error
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    names = peft_state_dict_names(model, trained)
    _check_names(folder, saved, names)
    for name, parameter in trained.items():
        with torch.no_grad(), context.init_context.gather([parameter]):
            values = saved[names[name]]
            if values.shape != parameter.shape:
                raise ModelError(
                    f"{ADAPTER_KEY}: `{names[name]}` has the shape {tuple(values.shape)} in {folder} and "
                    f"{tuple(parameter.shape)} in this model. It was trained on another base."
                )
            parameter.copy_(values)


def peft_state_dict_names(model: PeftModel, trained: Mapping[str, Any]) -> dict[str, str]:
    """Return the name under which peft saves each trained parameter, without saving values."""
    config = model.peft_config[ADAPTER_NAME]
    indices: dict[str, Any] = {name: torch.tensor(index) for index, name in enumerate(trained)}
    mode, config.inference_mode = config.inference_mode, True  # otherwise peft computes learned prompts
    written = get_peft_model_state_dict(model, state_dict=indices, save_embedding_layers=False)
    config.inference_mode = mode
    prompts = {name: _PROMPT_KEY for name in trained if name.startswith("prompt_encoder.")}
    names = list(trained)
    return {**{names[int(index)]: name for name, index in written.items() if name != _PROMPT_KEY}, **prompts}


def _check_names(folder: Path, saved: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    wanted = set(names.values())
    for what, different in (("lacks", wanted - saved.keys()), ("also holds", saved.keys() - wanted)):
        if different:
            some = ", ".join(sorted(different)[:3])
            raise ModelError(
                f"{ADAPTER_KEY}: {folder} {what} {len(different)} tensors ({some}): it is the adapter of another model."
            )
