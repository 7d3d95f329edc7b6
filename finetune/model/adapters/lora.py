"""LoRA adapters (Hu et al., 2021, arXiv:2106.09685), their variants and their initial values.

PiSSA and OLoRA subtract the initial factors from the base's weights; the factors are recorded, so that the exported
adapter fits the original base. LoftQ (Li et al., 2023, arXiv:2310.08659) starts from the best low-rank approximation
of the quantization error.
"""

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import transformers_weight_conversion as conversion
from peft.utils.integrations import dequantize_module_weight
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from finetune.config.sections.model import LoraSection
from finetune.errors import ModelError
from finetune.model.adapters.context import (
    ADAPTER_NAME,
    BASE_PREFIX,
    TASK_TYPES,
    AdapterContext,
    check_module_names,
    check_trained_once,
    is_conv1d,
    is_named,
    module_name,
    tied_modules,
)
from finetune.model.adapters.targets import (
    INITS_FROM_BASE,
    choose_targets,
    describe_targets,
    target_problems,
)
from finetune.model.layers import peft_exclude_pattern
from finetune.model.loading.architecture import new_head_modules
from finetune.model.loading.hub import loading_errors
from finetune.model.loading.load import as_cpu_float32
from finetune.runtime.seeds import derive_seed


def lora_config(model: PreTrainedModel, lora: LoraSection, context: AdapterContext) -> LoraConfig:
    """Return peft's config; raises ModelError for a target or module that the model does not have."""
    for problem in target_problems(model, lora):
        raise ModelError(str(problem))
    check_module_names(model, lora.modules_to_save, key="model.lora.modules_to_save")
    if not isinstance(lora.target_modules, str):
        check_module_names(model, lora.target_modules, key="model.lora.target_modules")
        check_trained_once(model, lora.target_modules, lora.modules_to_save, key="model.lora.modules_to_save")
    has_conv1d = any(map(is_conv1d, model.modules()))
    if lora.init == "olora" and has_conv1d:
        raise ModelError(
            "model.lora.init: peft's `olora` does not support layers with a transposed weight, which this model has. "
            "Write `pissa` or `default`."
        )
    targets = choose_targets(model, lora, head=context.head)
    # In older versions peft selected the targets: a checkpoint with adapters elsewhere keeps them.
    adapted = {_OWNER.sub("", name.removeprefix(BASE_PREFIX)) for name in context.recorded if ".lora_" in name}
    is_older = False
    if targets is not None and adapted and lora.experts is None and not lora.router:
        is_older = adapted != {*targets.modules, *(name.rpartition(".")[0] for name in targets.parameters)}
    targets = None if is_older else targets
    saved, is_saved_tied = _modules_to_save(model, lora, context)
    setattr(model, _SUMMARY, describe_targets(model, lora, targets))
    has_parameters = targets is not None and bool(targets.parameters)
    target_modules: Any = lora.target_modules if targets is None else targets.modules
    init: Any = lora.init if lora.init in ("gaussian", *INITS_FROM_BASE) else True
    if context.init_context.on_meta_device and lora.init in INITS_FROM_BASE:
        init = True  # factors cannot be computed from uninitialized weights
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0 if has_parameters else lora.dropout,  # peft refuses dropout of parameters; see `init_lora`
        target_modules=target_modules if isinstance(target_modules, str) else list(target_modules),
        target_parameters=list(targets.parameters) if targets and has_parameters else None,
        exclude_modules=peft_exclude_pattern(model),
        modules_to_save=saved or None,
        ensure_weight_tying=is_saved_tied,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        init_lora_weights=init,
        layers_to_transform=list(lora.layers) or None if targets is None else None,  # of an older checkpoint
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        trainable_token_indices=_new_token_rows(model, lora, context) or None,
        bias="none",
        fan_in_fan_out=has_conv1d,
        task_type=TASK_TYPES.get(context.head),
    )
    if is_older:
        conversion.convert_peft_config_for_transformers(config, model, None)
    return config


_SUMMARY = "_adapter_summary"


def adapter_summary(model: PeftModel) -> str | None:
    """Return the line about LoRA's targets in a mixture of experts or a model with mixers; None for other models."""
    summary: str | None = getattr(model.get_base_model(), _SUMMARY, None)
    return summary


_OWNER = re.compile(r"(?:\.base_layer)*\.lora_.*$")


def init_lora(model: PeftModel, lora: LoraSection, context: AdapterContext) -> None:
    """Initialize each adapter from its own seed, independent of rank, strategy and the order of modules.

    The values of some kinds of initialization depend on the base. Raises ModelError as `check_lora`.
    """
    check_lora(model, lora)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    if model.peft_config[ADAPTER_NAME].lora_dropout != lora.dropout:  # adapters of parameters prevented it
        for layer in layers.values():
            if not isinstance(layer, ParamWrapper):
                layer.lora_dropout[ADAPTER_NAME] = nn.Dropout(lora.dropout)
    if lora.init in INITS_FROM_BASE:  # peft has subtracted the factors: `W = residual + scale * B0 A0`
        factors = {
            name: parameter.detach().to("cpu", copy=True)
            for name, parameter in model.named_parameters()
            if (".lora_A." in name or ".lora_B." in name) and not parameter.is_meta
        }
        setattr(model, INITIAL_FACTORS, factors)
        return
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        for name, layer in layers.items():
            own = [
                parameter
                for own_name, parameter in layer.named_parameters()
                if own_name.startswith(("lora_A", "lora_B", "lora_emb"))
            ]
            with as_cpu_float32(own):
                torch.default_generator.manual_seed(derive_seed(context.seed, "adapters", name))
                layer.reset_lora_parameters(ADAPTER_NAME, "gaussian" if lora.init == "gaussian" else True)
    if lora.init == "loftq":
        _init_loftq(model, context)


def check_lora(model: PeftModel, lora: LoraSection) -> None:
    """Raise ModelError for patterns that match no adapter, which peft ignores."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):  # around the module of the parameter
            owner = re.sub(r"(\.base_layer)+$", "", name)
            names.append(f"{owner}.{module.parameter_name}")
        elif isinstance(module, LoraLayer):
            names.append(name)
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, key):
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
                endings = sorted({name.rpartition(".")[2] for name in names})
                raise ModelError(
                    f"model.lora.{key}: no module with an adapter has a name that ends with `{pattern}`. "
                    f"Their names end with {', '.join(endings)}."
                )


def _modules_to_save(model: PreTrainedModel, lora: LoraSection, context: AdapterContext) -> tuple[list[str], bool]:
    """Return the modules that are trained in full, and whether peft ties the head among them to the embeddings.

    peft 0.21 does so for `embed_tokens` and one head without a bias; `require_ties` refuses other tied modules.
    """
    saved = [*lora.modules_to_save, *new_head_modules(model, head=context.head)]
    tied = tied_modules(model)
    own = _named_modules(tied, saved)
    if not own or _named_modules(tied, lora.target_modules):
        return saved, False
    head = model.get_output_embeddings()
    inputs = str(module_name(model.get_input_embeddings(), model))
    is_one_head = set(tied) == {inputs, module_name(head, model)} and getattr(head, "bias", None) is None
    if not is_one_head or not is_named(inputs, "embed_tokens"):
        return saved, False
    return [*(name for name in saved if name not in own), inputs], True


def _named_modules(modules: Collection[str], names: Sequence[str] | str) -> list[str]:
    """Return the names of these modules among the names; none in `all-linear`, which leaves the head out."""
    own = () if isinstance(names, str) else names
    return [name for name in own if any(is_named(module, name) for module in modules)]


def _new_token_rows(model: PreTrainedModel, lora: LoraSection, context: AdapterContext) -> dict[str, list[int]]:
    """Return the rows of new tokens to train in embeddings and head; empty if all rows are trained."""
    if not context.new_ids:
        return {}
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = outputs is not None and inputs.weight is outputs.weight
    names = [module_name(module, model) for module in ((inputs,) if is_tied else (inputs, outputs))]
    saved, _ = _modules_to_save(model, lora, context)
    if is_tied and any(_named_modules(tied_modules(model), names) for names in (saved, lora.target_modules)):
        return {}  # all rows are trained, or `require_ties` refuses it
    return {
        name: list(context.new_ids)
        for name in names
        if name is not None and not any(is_named(name, module) for module in saved)
    }


INITIAL_FACTORS = "_first_factors"
"""Attribute of a model whose initialization changed the base: the initial factors by parameter name."""


def as_plain_lora(
    weights: Mapping[str, Tensor], config: LoraConfig, initial: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], LoraConfig]:
    """Return an equivalent adapter of the original base with twice the rank, and its config.

    `residual + s B A = W + s (B A - B0 A0) = W + s [B, -B0] [A; A0]` (Meng et al., 2024, arXiv:2404.02948, appendix).
    """
    doubled = dict(weights)
    for name, factor in initial.items():
        is_a = ".lora_A." in name
        signed = factor if is_a else -factor
        doubled[name] = torch.cat([weights[name], signed.to(weights[name])], dim=0 if is_a else 1)
    ratio = 2**0.5 if config.use_rslora else 2.0  # the scale is alpha / rank, or alpha / sqrt(rank)
    config = copy.deepcopy(config)
    config.init_lora_weights = True
    config.rank_pattern = {name: 2 * rank for name, rank in config.rank_pattern.items()}
    config.alpha_pattern = {name: ratio * alpha for name, alpha in config.alpha_pattern.items()}
    config.lora_alpha = ratio * config.lora_alpha
    config.r = 2 * config.r
    return doubled, config


def _init_loftq(model: PeftModel, context: AdapterContext) -> None:
    """Initialize each adapter with the largest singular components of `original - dequantized`, in one round.

    The original weights are read from the base's safetensors one at a time; raises ModelError if one is missing.
    """
    files: dict[str, Path] = {}
    with loading_errors(context.base or "", key="model.lora.init"):
        for path in sorted(Path(context.base or "").glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                files.update(dict.fromkeys(file.keys(), path))
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer):
                weight_name = name.removeprefix(BASE_PREFIX) + ".weight"
                if weight_name not in files:
                    raise ModelError(
                        f"model.lora.init: `loftq` needs the unquantized weights, but `{weight_name}` is not in the "
                        "base's safetensors files. Write `init: default`."
                    )
                with safe_open(files[weight_name], framework="pt") as file:
                    original: Tensor = file.get_tensor(weight_name)
                dequantized: Tensor = dequantize_module_weight(module.get_base_layer())  # [outputs, inputs]
                error = original.float() - dequantized.detach().float().cpu()
                left, values, right = torch.linalg.svd(error, full_matrices=False)
                rank = module.r[ADAPTER_NAME]
                root = (values[:rank] / module.scaling[ADAPTER_NAME]).sqrt()
                module.lora_A[ADAPTER_NAME].weight.copy_(root[:, None] * right[:rank])
                module.lora_B[ADAPTER_NAME].weight.copy_(left[:, :rank] * root)
