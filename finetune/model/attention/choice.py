"""Which attention a model gets: what the config asks for, where this machine has it, or the best for its kind."""

import importlib.util
from typing import Any

import torch

from finetune.errors import ModelError
from finetune.model.attention.kinds import keeps_samples_apart
from finetune.model.attention.per_sample import register
from finetune.runtime.end_to_end import PER_SAMPLE

PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def attention_implementation(name: str) -> str | None:
    """Return what the config asks for, None for `auto`; raises ModelError where it could not run here."""
    package = PACKAGES.get(name)
    if package is not None and not torch.cuda.is_available():
        raise ModelError(f"model.attention: `{name}` needs a CUDA GPU and there is none. Write `sdpa` or `auto`.")
    if package is not None and importlib.util.find_spec(package) is None:
        raise ModelError(
            f"model.attention: `{name}` needs the package `{package}`, which is not installed. "
            "Install it for your CUDA version, or write `sdpa` or `auto`."
        )
    return None if name == "auto" else name


def best_attention(config: Any) -> str | None:
    """Return our attention, by name, for models that are known to work with it; None is transformers' own choice."""
    if not keeps_samples_apart(config):
        return None
    register()
    return PER_SAMPLE
