"""Attention implementations: whether this machine has what the config asks for, said before anything is loaded."""

import importlib.util

import torch

from finetune.errors import ModelError

PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}


def attention_implementation(name: str) -> str | None:
    """Return what transformers is given, None for its own choice; raises ModelError where it could not run here."""
    package = PACKAGES.get(name)
    if package is not None and not torch.cuda.is_available():
        raise ModelError(f"model.attention: `{name}` needs a CUDA GPU and there is none. Write `sdpa` or `auto`.")
    if package is not None and importlib.util.find_spec(package) is None:
        raise ModelError(
            f"model.attention: `{name}` needs the package `{package}`, which is not installed. "
            "Install it for your CUDA version, or write `sdpa` or `auto`."
        )
    return None if name == "auto" else name
