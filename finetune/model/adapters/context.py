"""Which adapters a job asks for, the facts they are built from, and peft's names for heads and modules.

Does not import peft, which takes seconds.
"""

from collections.abc import Sequence
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
"""What a job may ask for; a path is the folder of an adapter to go on from."""


def adapter_config(section: ModelSection) -> AdapterConfig | None:
    """Return what the job asks for; None where the model's own weights learn."""
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
    """Tell whether this is a PeftModel; the name of its class does, so that nobody imports peft in order to ask."""
    return any(kind.__module__ == "peft.peft_model" for kind in type(model).__mro__)


@dataclass(frozen=True)
class AdapterContext:
    """Facts that decide which adapters are made and with which first values."""

    seed: int
    head: str = "causal_lm"
    revision: str | None = None  # of the base, recorded for the export
    init_context: InitContext = field(default_factory=InitContext)
    tokenizer: Any = None  # None for images alone
    new_ids: Sequence[int] = ()  # tokens that the model is given before training
    base: str | None = None  # where the weights as they were before quantisation lie


ADAPTER_NAME = "default"
"""Our one adapter's name in peft's models; it is in no file."""

TASK_TYPES = {
    "causal_lm": "CAUSAL_LM",
    "image_text_to_text": "CAUSAL_LM",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
}
"""What peft calls the heads; others it has no name for."""


def check_module_names(model: nn.Module, wanted: Sequence[str], *, key: str) -> None:
    """Refuse a name that no module bears in full or at its end; peft itself ignores it when another one matches."""
    names = [name for name, _ in model.named_modules()]
    for target in wanted:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            near = get_close_matches(target, {name.rpartition(".")[2] for name in names}, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise ModelError(f"{key}: no module is called `{target}`.{hint} {format_candidates(model)}")


def format_candidates(model: nn.Module) -> str:
    """Name the layers that can have an adapter, by the last part of their names."""
    kinds = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)
    last_names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, kinds) or is_conv1d(module)
    }
    return f"Modules that can be named: {', '.join(sorted(last_names))}."


def module_name(module: nn.Module | None, model: nn.Module) -> str | None:
    """Return the module's name in the model; None where it is not there."""
    return next((name for name, each in model.named_modules() if each is module), None) if module is not None else None


def is_conv1d(module: nn.Module) -> bool:
    """Tell whether this is GPT-2's linear layer, which holds its weight the other way round."""
    return isinstance(module, Conv1D)
