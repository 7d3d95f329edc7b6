"""The model as a reference: what it was before anything was learnt, and what that is known by."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune.config.sections.model import ModelSection
from finetune.model.adapters.wish import is_adapted
from finetune.model.base import folder_digest, weights_digest
from finetune.model.hub import located

_STARTS_WITHIN_BASE = ("pissa", "olora", "loftq")
"""Initialisations that move a part of the base into the adapters: without these, the base is not itself."""

_OF_ADAPTERS = frozenset({"lora", "ia3", "oft", "prompt_tuning", "prefix_tuning", "adapter"})
_OF_NO_VALUE = frozenset(
    {"gradient_checkpointing", "activation_offload", "cache_folder", "freeze", "train_only"}
    | {"name", "revision", "tokenizer"}
)


def starts_as_base(section: ModelSection) -> bool:
    """Tell whether the reference is the model without its adapters.

    It is not where an adapter is continued, and where the initialisation takes a part out of the base.
    """
    if section.adapter is not None:
        return False
    return section.lora is None or not section.lora.init.startswith(_STARTS_WITHIN_BASE)


@contextmanager
def as_reference(model: Any, section: ModelSection) -> Iterator[None]:
    """Have the model answer as the reference meanwhile: adapters off where they start from nothing.

    Which parameters learn is left alone, as peft's own switch does not. `model` is as the model wing built it.
    """
    if not is_adapted(model) or not starts_as_base(section):
        yield
        return
    if model.peft_config[model.active_adapter].is_prompt_learning:
        with model.disable_adapter():  # of these, it only passes the prompt by
            yield
        return
    switches = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    for module in switches:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in switches:
            module._disable_adapters = False


def reference_identity(
    section: ModelSection, *, seed: int, model: Any, say: Callable[[str], None]
) -> Mapping[str, Any]:
    """Return, as JSON, what the reference's answers depend on; may read every byte of the weights: on one rank.

    Fresh adapters that are off are no part of it, so other ranks of LoRA find the same answers.
    """
    left_out = _OF_NO_VALUE | (_OF_ADAPTERS if starts_as_base(section) else frozenset())
    known: dict[str, Any] = section.model_dump(mode="json", exclude=set(left_out), exclude_defaults=True)
    if section.name is not None:
        known["weights"] = weights_digest(section, model=model, say=say)
    if section.name is None or "lora" in known or section.new_tokens is not None:
        known["seed"] = seed
    if section.adapter is not None:
        known["adapter"] = folder_digest(Path(located(str(section.adapter), key="model.adapter")), say=say)
    return known
