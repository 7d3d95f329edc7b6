"""Activations that are recomputed in the backward pass: of whole layers, of every n-th, or all but the dear ones.

`selective` keeps what matrix products and attention give and recomputes the cheap rest (Korthikanti et al., 2022,
arXiv:2205.05198). Random numbers are drawn again as they were, so dropout stays what it was.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.errors import ModelError

Recomputing = bool | int | Literal["selective"]
"""True: every layer. A number n: every n-th layer. `selective`: in every layer, what is cheap."""

_MATRIX = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


def recompute(model: PreTrainedModel, wish: Recomputing) -> None:
    """Have the model recompute activations; raises ModelError for one that cannot.

    Without reentrance, the only way that FSDP2 and frozen bases both allow.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"model.gradient_checkpointing: `{model.config.model_type}` does not support it. Write `false`."
        )
    settings: dict[str, Any] = {"use_reentrant": False}
    if wish == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, dear_operators())
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:  # transformers before 5.20 or so; may go when pyproject.toml asks for a newer one
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    if wish is not True and isinstance(wish, int):
        _every(model, wish)


def dear_operators() -> list[torch._ops.OpOverload]:
    """Return the operators whose results are kept: matrix products and attention, as far as this torch has them."""
    packets = [getattr(torch.ops.aten, name, None) for name in (*_MATRIX, *_ATTENTION)]
    return [packet.default for packet in packets if packet is not None]


def _every(model: PreTrainedModel, number: int) -> None:
    """Recompute the first of so many layers, then the next one after them, and so on."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if len(layers) < number:
        raise ModelError(
            f"model.gradient_checkpointing: {number} means one of so many layers, and `{model.config.model_type}` has "
            f"{len(layers)} that can recompute. Write `true` or `selective`."
        )
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % number == 0
