"""Gradient checkpointing: activations are recomputed in the backward pass.

`selective` checkpointing saves the results of matrix products and attention and recomputes the cheap rest
(Korthikanti et al., 2022, arXiv:2205.05198); random numbers are drawn again as before, so dropout is unchanged.
"""

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.errors import ModelError
from finetune.model.upstream import checkpoint_activations

CheckpointingMode = bool | int | Literal["selective"]
"""True: every layer. A number n: every n-th layer. `selective`: the cheap operators of every layer."""

_MATMUL_OPERATORS = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"),
        *("aten::_grouped_mm", "aten::_scaled_grouped_mm", "transformers::grouped_mm_fallback"),  # experts
    }
)
_ATTENTION_OPERATORS = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
        "torch_attn::_varlen_attn",
        "flex_attention",
    }
)
_FLASH_ATTENTION_OPERATORS = re.compile(r"_?(vllm_)?flash_attn\w*::(_flash_attn_)?(varlen_)?(fwd|forward)")
"""Of the packages `flash_attn` (2 and 3), and of their builds on the hub, whose names end with a digest."""


def enable_gradient_checkpointing(model: PreTrainedModel, mode: CheckpointingMode) -> None:
    """Enable gradient checkpointing; raises ModelError for a model that does not support it.

    Non-reentrant, the only variant that works with both FSDP2 and frozen bases.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"model.gradient_checkpointing: `{model.config.model_type}` does not support it. Write `false`."
        )
    settings: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    checkpoint_activations(model, settings)
    if mode is not True and isinstance(mode, int):
        _checkpoint_every(model, mode)


def take_checkpointing(module: nn.Module) -> Callable[..., Any] | None:
    """Return what recomputes the module's forward, which no longer does so by itself; None where nothing is to be done.

    transformers 5.17 checkpoints a layer outside its `forward`, 5.23 inside. If that is compiled, `selective` records
    results whose memory the compiled code writes again: "has been mutated", with torch 2.11. Newer ones checkpoint
    inside, where the compiler sees it; can go when pyproject.toml requires them.
    """
    is_outside = "__call__" in vars(GradientCheckpointingLayer)
    if not is_outside or not isinstance(module, GradientCheckpointingLayer) or not module.gradient_checkpointing:
        return None
    module.gradient_checkpointing = False
    recompute: Callable[..., Any] = module._gradient_checkpointing_func
    return recompute


@cache
def is_saved(operator: str) -> bool:
    """Tell whether `selective` saves the results of an operator: those of matrix products and of attention are.

    By name: some of these operators are registered only when attention runs for the first time.
    """
    name = operator.partition(".")[0]
    is_listed = name in _MATMUL_OPERATORS or name in _ATTENTION_OPERATORS
    return is_listed or _FLASH_ATTENTION_OPERATORS.fullmatch(name) is not None


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_saved(operator.name()) else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpoint_every(model: PreTrainedModel, number: int) -> None:
    """Checkpoint one of every `number` layers, starting with the first."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if len(layers) < number:
        raise ModelError(
            f"model.gradient_checkpointing: one of every {number} layers is too many for "
            f"`{model.config.model_type}`, which has {len(layers)} layers. Write `true` or `selective`."
        )
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % number == 0
