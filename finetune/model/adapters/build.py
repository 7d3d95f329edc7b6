"""Adds adapters to a frozen base through peft: new ones, or a saved one to continue training."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, PromptTuningInit, get_peft_model, get_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.oft import OFTLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from finetune.config.sections.model import LoraSection, PeftSection
from finetune.errors import ModelError
from finetune.model.adapters.context import (
    ADAPTER_NAME,
    TASK_TYPES,
    AdapterConfig,
    AdapterContext,
    check_module_names,
    check_trained_once,
    format_candidates,
    is_conv1d,
    tied_modules,
)
from finetune.model.adapters.lora import init_lora, lora_config
from finetune.model.adapters.products import group_expert_adapters
from finetune.model.adapters.targets import keep_targets
from finetune.model.layers import peft_exclude_pattern
from finetune.model.loading.architecture import new_head_modules
from finetune.model.loading.config_values import suggestion
from finetune.model.loading.hub import error_summary, loading_errors
from finetune.model.loading.pretrained import (
    ADAPTER_KEY,
    ADAPTER_WEIGHTS,
    load_adapter_config,
    read_saved_adapter_config,
)
from finetune.registry.model_choices import PEFT_TYPES, is_prompt_type
from finetune.runtime.optional import no_op
from finetune.runtime.seeds import derive_seed

_KEY = "model.peft"


def peft_config(model: PreTrainedModel, section: PeftSection, context: AdapterContext) -> PeftConfig:
    """Return peft's config of this type; raises ModelError for an unknown type, value or module."""
    classes = {str(kind.value).lower(): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if section.type not in classes:
        known = sorted(name for name in classes if name not in PEFT_TYPES or not PEFT_TYPES[name].refusal)
        hint = suggestion(section.type, known) or f" It has {', '.join(known)}."
        raise ModelError(f"{_KEY}.type: the installed peft has no `{section.type}`.{hint}")
    config_class: Any = classes[section.type]
    arguments = sorted(field.name for field in dataclasses.fields(config_class))
    for name in section.values:
        if name not in arguments:
            hint = suggestion(name, arguments) or f" It has {', '.join(arguments)}."
            raise ModelError(f"{_KEY}.values: {config_class.__name__} has no `{name}`.{hint}")
    targets = section.values.get("target_modules")
    if isinstance(targets, list):
        check_module_names(model, targets, key=f"{_KEY}.values.target_modules")
        saved = section.values.get("modules_to_save") or ()
        check_trained_once(model, targets, saved, key=f"{_KEY}.values.modules_to_save")
    values = {**_own_defaults(model, section, context), **section.values, "task_type": TASK_TYPES.get(context.head)}
    values.pop("prompt_tuning_init_text", None)  # read by `init_prompt`; peft would load the tokenizer by its name
    if not is_prompt_type(section.type) and "modules_to_save" in inspect.signature(config_class).parameters:
        heads = list(new_head_modules(model, head=context.head))
        values["modules_to_save"] = [*(section.values.get("modules_to_save") or ()), *heads] or None
    try:
        config: PeftConfig = config_class(**values)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{_KEY}.values: {error}") from error
    if config.is_prompt_learning and not is_prompt_type(section.type):
        raise ModelError(f"{_KEY}.type: `{section.type}` trains virtual tokens. Write `prompt_tuning`.")
    return config


_PROMPT_HEADS = ("causal_lm", "seq2seq_lm")
"""Heads that read every position; others read the first or last one, which would be a learned token."""


def _own_defaults(model: PreTrainedModel, section: PeftSection, context: AdapterContext) -> dict[str, Any]:
    """Return the arguments of this type whose defaults here are not peft's; raises ModelError for an unfit head."""
    if is_prompt_type(section.type) and (context.head not in _PROMPT_HEADS or context.tokenizer is None):
        raise ModelError(
            f"{_KEY}.type: models with the head `{context.head}` do not support `{section.type}`. Write `model.lora` "
            "instead."
        )
    match section.type:
        case "vera":  # peft draws the projections again from `projection_prng_key`, the same on every machine
            return {"save_projection": False}
        case "ia3":
            return {"fan_in_fan_out": any(map(is_conv1d, model.modules()))}
        case "oft":
            return {"exclude_modules": peft_exclude_pattern(model)}
        case "prompt_tuning":  # only an encoder's input gets learned tokens; `init_prompt` initializes them
            return {"num_transformer_submodules": 1, "prompt_tuning_init": "RANDOM"}
    return {}


_PROMPT_KEY = "prompt_embeddings"


def saved_adapter_config(model: PreTrainedModel, folder: Path, context: AdapterContext) -> PeftConfig:
    """Return the config of the folder's adapter for training; raises ModelError if it does not fit the task."""
    read_saved_adapter_config(folder)
    with loading_errors(str(folder), key=ADAPTER_KEY):
        config: PeftConfig = load_adapter_config(folder)
    expected = TASK_TYPES.get(context.head)
    if config.task_type not in (expected, None):
        raise ModelError(f"{ADAPTER_KEY}: {folder} was trained for {config.task_type}, but this task needs {expected}.")
    values = {
        "inference_mode": False,
        "init_lora_weights": True,  # the base must not change, however the adapter was initialized
        "prompt_tuning_init": PromptTuningInit.RANDOM,  # others would load the tokenizer named in the config
    }
    for name, value in values.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def load_saved_weights(model: PeftModel, folder: Path, context: AdapterContext) -> None:
    """Load the folder's weights into the adapter; raises ModelError for a mismatch. Collective under ZeRO-3."""
    try:
        saved = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{ADAPTER_KEY}: {folder / ADAPTER_WEIGHTS} cannot be read: {error}.") from error
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = peft_state_dict_names(model, trained)
    expected = set(names)
    for problem, differing in (("lacks", expected - saved.keys()), ("has extra", saved.keys() - expected)):
        if differing:
            listed = ", ".join(sorted(differing)[:3])
            raise ModelError(
                f"{ADAPTER_KEY}: {folder}: {problem} {len(differing)} tensors ({listed}): it is the adapter of another "
                "model."
            )
    for saved_name, name in names.items():
        parameter = trained[name]
        with torch.no_grad(), context.init_context.gather([parameter]):
            values = saved[saved_name]
            if values.shape != parameter.shape:
                raise ModelError(
                    f"{ADAPTER_KEY}: `{saved_name}` has the shape {tuple(values.shape)} in {folder} and "
                    f"{tuple(parameter.shape)} in this model. It was trained on another base."
                )
            parameter.copy_(values)


def peft_state_dict_names(model: PeftModel, trained: Mapping[str, Any]) -> dict[str, str]:
    """Return the trained parameter that peft saves under each name, without saving values; a tied one has two names."""
    config, names = model.peft_config[ADAPTER_NAME], list(trained)
    positions = {parameter: index for index, parameter in enumerate(trained.values())}
    indices: dict[str, Any] = {
        name: torch.tensor(positions[parameter])
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter in positions
    }
    mode, config.inference_mode = config.inference_mode, True  # otherwise peft computes learned prompts
    written = get_peft_model_state_dict(model, state_dict=indices, save_embedding_layers=False)
    config.inference_mode = mode
    by_name = {name: names[int(index)] for name, index in written.items() if name != _PROMPT_KEY}
    prompt = next((name for name in trained if name.startswith("prompt_encoder.")), None)
    return by_name if prompt is None else {**by_name, _PROMPT_KEY: prompt}


def add_adapter(model: PreTrainedModel, adapter: AdapterConfig, context: AdapterContext) -> PeftModel:
    """Return the model with a frozen base and float32 adapters.

    Their values depend only on the seed and module names, for `pissa`, `olora` and `loftq` also on the base's weights;
    a saved adapter keeps its values. Initially they do not change the model's outputs, except learned prompts and a
    saved adapter. Raises ModelError for adapters that this model does not support. Collective under ZeRO-3.
    """
    method = _METHODS[Path if isinstance(adapter, Path) else type(adapter)]
    tied = tied_modules(model)
    try:
        config = method.config(model, adapter, context)
        with nullcontext() if isinstance(adapter, Path) else keep_targets(), torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(derive_seed(context.seed, "adapters", method.key))
            adapted = get_peft_model(model, config, adapter_name=ADAPTER_NAME, revision=context.revision)
    except (ValueError, TypeError) as error:  # from peft, for layers that this method does not support
        unsupported = re.match(r"Target module (\w+)\(.*\) is not supported", str(error), re.DOTALL)
        reason = f"peft has no such adapter for a {unsupported[1]}." if unsupported else error_summary(error)
        raise ModelError(f"model.{method.key}: {reason} {format_candidates(model)}") from error
    require_ties(adapted, tied, key=f"model.{method.key}")
    method.fill(adapted, adapter, context)
    group_expert_adapters(adapted)
    return adapted


def require_ties(model: PeftModel, tied: Mapping[str, nn.Parameter], *, key: str) -> None:
    """Raise ModelError where modules that were tied no longer are, since peft adapts and copies one by one."""
    base = model.get_base_model()
    trained = {name: _trained_weight(base.get_submodule(name)) for name in tied}
    for weight in set(tied.values()):
        names = [name for name in tied if tied[name] is weight]
        if len({id(trained[name]) for name in names}) > 1:
            changed = " and ".join(f"`{name}`" for name in names if trained[name] is not weight)
            others = ", ".join(f"`{name}`" for name in names)
            raise ModelError(
                f"{key}: the weights of {others} are tied, and adapting {changed} would untie them. Leave "
                f"{'it' if ' and ' not in changed else 'them'} out{_TRAINS_TIED if key == 'model.lora' else ''}."
            )


_TRAINS_TIED = "; `model.lora.modules_to_save: [embed_tokens]` trains a tied weight in full where peft can tie its copy"


def _trained_weight(module: nn.Module) -> Any:
    """Return what determines the module's weight: the weight, a copy of it, the rows of new tokens, or an adapter."""
    if isinstance(module, ModulesToSaveWrapper):
        return module.modules_to_save[ADAPTER_NAME].weight
    if isinstance(module, TrainableTokensWrapper):
        return module.token_adapter.trainable_tokens_delta[ADAPTER_NAME]
    return module if isinstance(module, BaseTunerLayer) else module.weight


@dataclass(frozen=True)
class _Method:
    key: str  # in `model:`
    config: Callable[[PreTrainedModel, Any, AdapterContext], PeftConfig]
    fill: Callable[[PeftModel, Any, AdapterContext], None]  # initializes the adapter and checks it


def check_oft_blocks(model: PeftModel, section: PeftSection, context: AdapterContext) -> None:
    """Raise ModelError for a block size that does not divide a layer's inputs, for which peft would use another one."""
    size = model.peft_config[ADAPTER_NAME].oft_block_size
    for name, module in model.named_modules():
        if size and isinstance(module, OFTLayer) and module.oft_block_size[ADAPTER_NAME] != size:
            raise ModelError(
                f"{_KEY}.values.oft_block_size: blocks of {size} do not divide the {module.in_features} inputs of "
                f"`{name.removeprefix('base_model.model.')}`. Write a divisor, such as "
                f"{module.oft_block_size[ADAPTER_NAME]}, or fewer `target_modules`."
            )


def init_prompt(model: PeftModel, section: PeftSection, context: AdapterContext) -> None:
    """Initialize from the embeddings of the text, repeated as needed, or of tokens drawn from the seed."""
    learned = model.prompt_encoder[ADAPTER_NAME].embedding.weight  # [tokens, width]
    embeddings = model.get_base_model().get_input_embeddings()
    text = section.values.get("prompt_tuning_init_text")
    if text is None:
        generator = torch.Generator().manual_seed(derive_seed(context.seed, "adapters", "prompt"))
        ids = torch.randint(len(context.tokenizer), (len(learned),), generator=generator)
    else:
        text_ids = torch.tensor(context.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not len(text_ids):
            key = f"{_KEY}.values.prompt_tuning_init_text"
            raise ModelError(f"{key}: the text has no tokens. Write some words, or remove it.")
        ids = text_ids.repeat(-(-len(learned) // len(text_ids)))[: len(learned)]
    with torch.no_grad(), context.init_context.gather([embeddings.weight]):
        if not context.init_context.on_meta_device:
            learned.copy_(embeddings.weight[ids].to(learned))


def init_prefix(model: PeftModel, section: PeftSection, context: AdapterContext) -> None:
    """Initialize keys and values from the seed with a normal distribution, as peft does."""
    learned = model.prompt_encoder[ADAPTER_NAME].embedding.weight  # [tokens, 2 x layers x width]
    generator = torch.Generator().manual_seed(derive_seed(context.seed, "adapters", "prefix"))
    with torch.no_grad():
        learned.copy_(torch.randn(learned.shape, generator=generator))


_INITS = {"oft": check_oft_blocks, "prompt_tuning": init_prompt, "prefix_tuning": init_prefix}


def init_peft(model: PeftModel, section: PeftSection, context: AdapterContext) -> None:
    """Initialize an adapter of a type that peft does not initialize reproducibly, and check it; raises ModelError."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"{_KEY}: `{section.type}` with these values trains nothing. Write its `target_modules`.")
    _INITS.get(section.type, no_op)(model, section, context)


_METHODS: Mapping[type, _Method] = {
    LoraSection: _Method("lora", lora_config, init_lora),
    PeftSection: _Method("peft", peft_config, init_peft),
    Path: _Method("adapter", saved_adapter_config, load_saved_weights),
}
