"""Adds the adapters that a job asks for to a frozen base, through peft."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from finetune.config.sections.model import (
    Ia3Section,
    LoraSection,
    OftSection,
    PrefixTuningSection,
    PromptTuningSection,
)
from finetune.errors import ModelError
from finetune.model.adapters.context import ADAPTER_NAME, AdapterConfig, AdapterContext, format_candidates
from finetune.model.adapters.lora import INITS_FROM_BASE, check_lora, init_loftq, lora_config, record_initial_factors
from finetune.model.adapters.other_methods import (
    check_oft,
    ia3_config,
    init_prefix,
    init_prompt,
    oft_config,
    prefix_config,
    prompt_config,
)
from finetune.model.adapters.saved import load_saved_weights, saved_adapter_config
from finetune.model.loading.hub import error_summary
from finetune.model.loading.initialize import as_cpu_float32
from finetune.model.upstream import skip_redundant_casts
from finetune.runtime.seeds import derive_seed


def add_adapter(model: PreTrainedModel, adapter: AdapterConfig, context: AdapterContext) -> PeftModel:
    """Return the model with a frozen base and float32 adapters.

    Their values depend only on the seed and module names, for `pissa`, `olora` and `loftq` also on the base's weights,
    and for a path on what is saved there. Initially they change nothing, except learned prompts and a saved adapter.
    Raises ModelError for what this model does not support. Collective under ZeRO-3.
    """
    kind = _METHODS[_method_of(adapter)]
    try:
        config = kind.config(model, adapter, context)
        adapted = get_peft_model(model, config, adapter_name=ADAPTER_NAME, revision=context.revision)
    except (ValueError, TypeError) as error:  # from peft, for layers that this method does not support
        raise ModelError(f"model.{kind.key}: {error_summary(error)} {format_candidates(model)}") from error
    kind.fill(adapted, adapter, context)
    skip_redundant_casts(adapted)
    return adapted


@dataclass(frozen=True)
class _Method:
    key: str  # in `model:`
    config: Callable[[PreTrainedModel, Any, AdapterContext], PeftConfig]
    fill: Callable[[PeftModel, Any, AdapterContext], None]  # initializes the adapter and checks it


def _method_of(adapter: AdapterConfig) -> type:
    return Path if isinstance(adapter, Path) else type(adapter)


def _init_lora(model: PeftModel, lora: LoraSection, context: AdapterContext) -> None:
    check_lora(model, lora)
    if lora.init in INITS_FROM_BASE:
        record_initial_factors(model, lora.init)
        return
    _init_factors(model, is_gaussian=lora.init == "gaussian", seed=context.seed)
    if lora.init == "loftq":
        init_loftq(model, context)


def _init_factors(model: PeftModel, *, is_gaussian: bool, seed: int) -> None:
    """Initialize each adapter from its own seed, independent of rank, strategy and the order of modules."""
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer):
                factors = [
                    p for own, p in module.named_parameters() if own.startswith(("lora_A", "lora_B", "lora_emb"))
                ]
                with as_cpu_float32(factors):
                    torch.default_generator.manual_seed(derive_seed(seed, "adapters", name))
                    module.reset_lora_parameters(ADAPTER_NAME, "gaussian" if is_gaussian else True)


def _keep_peft_init(model: PeftModel, adapter: AdapterConfig, context: AdapterContext) -> None:
    """Keep peft's initialization with ones, which is not random."""


def _check_oft_blocks(model: PeftModel, oft: OftSection, context: AdapterContext) -> None:
    check_oft(model, oft)


def _init_prefix(model: PeftModel, prefix: PrefixTuningSection, context: AdapterContext) -> None:
    init_prefix(model, context)


_METHODS: Mapping[type, _Method] = {
    LoraSection: _Method("lora", lora_config, _init_lora),
    Ia3Section: _Method("ia3", ia3_config, _keep_peft_init),
    OftSection: _Method("oft", oft_config, _check_oft_blocks),
    PromptTuningSection: _Method("prompt_tuning", prompt_config, init_prompt),
    PrefixTuningSection: _Method("prefix_tuning", prefix_config, _init_prefix),
    Path: _Method("adapter", saved_adapter_config, load_saved_weights),
}
