"""The adapter of a job, the inputs for building it, and peft's names for heads and modules.

Does not import peft, which takes seconds.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune.config.sections.model import LoraSection, ModelSection, PeftSection
from finetune.errors import ModelError
from finetune.model.loading.config_values import suggestion
from finetune.runtime.parameters import InitContext

AdapterConfig = LoraSection | PeftSection | Path
"""An adapter section; a path is the folder of an adapter to continue training."""


def adapter_config(section: ModelSection) -> AdapterConfig | None:
    """Return the adapter configured by the job; None if the model's own weights are trained."""
    if section.adapter is not None:
        return Path(section.adapter)
    return section.lora or section.peft


def has_adapter(model: nn.Module) -> bool:
    """Return whether this is a PeftModel, by the module of its class, without importing peft."""
    return any(parent.__module__ == "peft.peft_model" for parent in type(model).__mro__)


@dataclass(frozen=True)
class AdapterContext:
    """The inputs for building adapters in addition to their section."""

    seed: int
    head: str = "causal_lm"
    revision: str | None = None  # of the base, recorded for the export
    init_context: InitContext = field(default_factory=InitContext)
    tokenizer: Any = None  # None for images only
    new_ids: Sequence[int] = ()  # of tokens added before training
    base: str | None = None  # folder of the unquantized weights
    recorded: Collection[str] = ()  # names of the parameters in the checkpoint that the run resumes from


ADAPTER_NAME = "default"
"""Name of the adapter in peft's models; it is not written to files."""

TASK_TYPES = {
    "causal_lm": "CAUSAL_LM",
    "image_text_to_text": "CAUSAL_LM",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "embedding": "FEATURE_EXTRACTION",
}
"""peft's task types by head; it has none for other heads."""


BASE_PREFIX = "base_model.model."


def base_parameter_name(name: str) -> str:
    """Return the name that a weight of the base had before peft wrapped its module, once or several times.

    >>> base_parameter_name("base_model.model.lm_head.base_layer.weight")
    'lm_head.weight'
    >>> base_parameter_name("base_model.model.mlp.experts.base_layer.base_layer.down_proj")
    'mlp.experts.down_proj'
    """
    inner = name.removeprefix(BASE_PREFIX).replace(".token_adapter.", ".")
    return re.sub(r"(?:\.base_layer)+\.", ".", inner).replace(".original_module.", ".")


def check_module_names(model: nn.Module, targets: Sequence[str], *, key: str) -> None:
    """Raise ModelError for a target that matches no module's name or suffix; peft ignores it if another one matches."""
    names = [name for name, _ in model.named_modules()]
    for target in targets:
        if not any(is_named(name, target) for name in names):
            last_names = {name.rpartition(".")[2] for name in names}
            hint = suggestion(target, sorted(last_names))
            experts = " Write `model.lora.experts: true` for the matrices of routed experts."
            candidates = format_candidates(model) + (experts if "experts" in last_names else "")
            raise ModelError(f"{key}: no module is named `{target}`.{hint} {candidates}")


def check_trained_once(model: nn.Module, targets: Collection[str], saved: Collection[str], *, key: str) -> None:
    """Raise ModelError for a module that gets an adapter and is trained in full; peft leaves out the adapter."""
    for name, _ in model.named_modules():
        if any(is_named(name, target) for target in targets) and any(is_named(name, module) for module in saved):
            raise ModelError(f"{key}: `{name}` is in `target_modules`, too. Remove it from one of them.")


def is_named(name: str, target: str) -> bool:
    """Return whether a module of this full name is the target, or ends with its name."""
    return name == target or name.endswith(f".{target}")


def tied_modules(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the modules that share the weight of an embedding, by name, with it: the embedding and the heads."""
    weights: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if weight is not None:
            weights.setdefault(weight, []).append(name)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    shared = ((weight, names) for weight, names in weights.items() if weight in embeddings and len(names) > 1)
    return {name: weight for weight, names in shared for name in names}


def format_candidates(model: nn.Module) -> str:
    """Return a sentence with the layers that can have an adapter, by the last part of their names."""
    last_names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d) or is_conv1d(module)
    }
    return f"Available modules: {', '.join(sorted(last_names))}."


def module_name(module: nn.Module | None, model: nn.Module) -> str | None:
    """Return the module's name in the model; None if it is not in it."""
    if module is None:
        return None
    return next((name for name, candidate in model.named_modules() if candidate is module), None)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether this is GPT-2's linear layer, whose weight is transposed."""
    return isinstance(module, Conv1D)
