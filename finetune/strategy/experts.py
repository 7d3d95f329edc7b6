"""Experts that are separate modules, of which a rank calls only those that its tokens are routed to.

If all experts of a layer are one parameter, as in nearly every model of transformers 5, each rank uses all of it and
nothing here applies. If they are modules in a list (Switch Transformers, NLLB, code from the hub), ranks call different
modules: DDP and FSDP2 wait for gradients that only some ranks have, and ZeRO-3 gathers parameters that other ranks do
not request.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune.runtime.optional import require

_LISTS = (nn.ModuleList, nn.ModuleDict)


def keep_experts_in_graph(model: nn.Module) -> None:
    """Give every expert a gradient in every backward pass, zero without tokens.

    Also on one process: without a gradient, AdamW would skip an expert that it updates with several processes.
    """
    for layer, experts in list(separate_experts(model)):
        layer.__dict__["forward"] = _using_all(experts, layer.forward)  # within the hooks that gather parameters


def set_zero3_leaf_modules(accelerator: Accelerator, model: nn.Module) -> None:
    """Make ZeRO-3 gather all experts of a layer at its entry; call it before the model is prepared."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    layer_types = {type(layer) for layer, _ in separate_experts(model)}
    if plugin is None or plugin.deepspeed_config["zero_optimization"]["stage"] != 3 or not layer_types:
        return
    require("deepspeed.utils", extra="deepspeed", purpose="DeepSpeed ZeRO").set_z3_leaf_modules(
        model, list(layer_types)
    )


def separate_experts(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each module whose forward calls some of a list of experts, and that list."""
    for module in model.modules():
        for name, child in module.named_children():
            if "expert" in name and isinstance(child, _LISTS) and any(True for _ in child.parameters()):
                has_forward = type(child).forward is not nn.Module.forward  # torch's own lists have none
                yield (child if has_forward else module), child


def _using_all(experts: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward that adds zero times an element of each trained parameter to its input, the hidden states.

    At the input, so that all of them get their gradients last in the backward pass, and in the same order on every
    rank: ZeRO-2 reduces gradients in the order of their computation.
    """

    def use_all(hidden: Tensor, *arguments: Any, **named: Any) -> Any:
        used = [parameter.flatten()[0] for parameter in experts.parameters() if parameter.requires_grad]
        if used and torch.is_grad_enabled():
            hidden = hidden + (0.0 * torch.stack(used).sum()).to(hidden.dtype)
        return forward(hidden, *arguments, **named)

    return use_all
