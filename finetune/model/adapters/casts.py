"""Under autocast an adapter's input is cast once, by autocast, instead of to the adapter's type and back."""

from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


def leave_casts_to_autocast(model: nn.Module) -> None:
    """Have LoRA's layers hand a 16-bit input to their matrices as it is where autocast would round it back anyway.

    peft widens every input to the adapter's float32, which autocast undoes right away: the same bits, for two passes
    over the activations in every adapted layer (peft 0.21). Dropout and DoRA, which go by the type, keep it.
    """
    for layer in model.modules():
        if isinstance(layer, LoraLayer) and _is_plain(layer):
            layer._cast_input_dtype = _cast


def _is_plain(layer: Any) -> bool:
    drops = any(not isinstance(each, nn.Identity) for each in layer.lora_dropout.values())
    return not drops and not getattr(layer, "lora_variant", {})


def _cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    is_left = x is None or x.dtype == dtype or (x.element_size() == 2 and torch.is_autocast_enabled(x.device.type))
    return x if is_left or x is None else x.to(dtype)
