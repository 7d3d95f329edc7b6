"""Which adapters a job asks for, the facts they are built from, and peft's names for heads and modules.

Does not import peft, which takes seconds.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune.config.sections.model import (
    Ia3Section,
    LoraSection,
    ModelSection,
    OftSection,
    PrefixTuningSection,
    PromptTuningSection,
)
from finetune.errors import ModelError
from finetune.runtime.parameters import InitContext

AdapterConfig = LoraSection | Ia3Section | OftSection | PromptTuningSection | PrefixTuningSection | Path
"""An adapter section; a path is the folder of an adapter to continue training."""


def adapter_config(section: ModelSection) -> AdapterConfig | None:
    """Return the adapter that the job configures; None where the model's own weights are trained."""
    if section.adapter is not None:
        return Path(section.adapter)
    kinds: tuple[AdapterConfig | None, ...] = (
        section.lora,
        section.ia3,
        section.oft,
        section.prompt_tuning,
        section.prefix_tuning,
    )
    return next((each for each in kinds if each is not None), None)


def has_adapter(model: nn.Module) -> bool:
    """Return whether this is a PeftModel; decided by the name of its class, without importing peft."""
    return any(kind.__module__ == "peft.peft_model" for kind in type(model).__mro__)


@dataclass(frozen=True)
class AdapterContext:
    """Facts of the run that adapters are built from besides their own section."""

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
"""peft's task types of heads; it has none for other heads."""


BASE_PREFIX = "base_model.model."


def base_parameter_name(name: str) -> str:
    """Return the name that a weight of the base had before peft wrapped its module, however often.

    >>> base_parameter_name("base_model.model.lm_head.base_layer.weight")
    'lm_head.weight'
    >>> base_parameter_name("base_model.model.mlp.experts.base_layer.base_layer.down_proj")
    'mlp.experts.down_proj'
    """
    inner = name.removeprefix(BASE_PREFIX).replace(".token_adapter.", ".")
    return re.sub(r"(?:\.base_layer)+\.", ".", inner).replace(".original_module.", ".")


def check_module_names(model: nn.Module, wanted: Sequence[str], *, key: str) -> None:
    """Raise ModelError for a name that no module has, in full or at its end; peft ignores it if another matches."""
    names = [name for name, _ in model.named_modules()]
    for target in wanted:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            near = get_close_matches(target, {name.rpartition(".")[2] for name in names}, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise ModelError(
                f"{key}: no module is named `{target}`.{hint} {format_candidates(model)}{_experts_hint(model)}"
            )


def format_candidates(model: nn.Module) -> str:
    """Return a sentence with the layers that can have an adapter, by the last part of their names."""
    kinds = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)
    last_names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, kinds) or is_conv1d(module)
    }
    return f"Available modules: {', '.join(sorted(last_names))}."


def _experts_hint(model: nn.Module) -> str:
    has_experts = any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())
    return " Write `model.lora.experts: true` for the matrices of routed experts." if has_experts else ""


def module_name(module: nn.Module | None, model: nn.Module) -> str | None:
    """Return the module's name in the model; None if it is not in it."""
    return next((name for name, each in model.named_modules() if each is module), None) if module is not None else None


def is_conv1d(module: nn.Module) -> bool:
    """Return whether this is GPT-2's linear layer, whose weight is transposed."""
    return isinstance(module, Conv1D)
