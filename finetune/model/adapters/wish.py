"""What adapters a job asks for, and whether a model has some: known without peft, which takes seconds to import."""

from pathlib import Path

from torch import nn

from finetune.config.sections.model import (
    Ia3Section,
    LoraSection,
    ModelSection,
    OftSection,
    PrefixTuningSection,
    PromptTuningSection,
)

Wish = LoraSection | Ia3Section | OftSection | PromptTuningSection | PrefixTuningSection | Path
"""What a job may ask for; a path is the folder of an adapter to go on from."""


def adapter_wish(section: ModelSection) -> Wish | None:
    """Return what the job asks for; None where the model's own weights learn."""
    if section.adapter is not None:
        return Path(section.adapter)
    kinds: tuple[Wish | None, ...] = (
        section.lora,
        section.ia3,
        section.oft,
        section.prompt_tuning,
        section.prefix_tuning,
    )
    return next((wish for wish in kinds if wish is not None), None)


def is_adapted(model: nn.Module) -> bool:
    """Tell whether this is a PeftModel; the name of its class does, so that nobody imports peft in order to ask."""
    return any(kind.__module__ == "peft.peft_model" for kind in type(model).__mro__)
