"""Experts that are modules of their own, of which a rank calls only those that its tokens are sent to.

Where all experts of a layer are one parameter, as in nearly every model of transformers 5, each rank uses all of it and
nothing here applies. Where they are modules in a list (Switch Transformers, NLLB, code that comes with a hub model),
ranks differ in what they call: DDP and FSDP2 wait for gradients that one rank has and another has not, and ZeRO-3
gathers parameters that others do not ask for.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune.runtime.optional import require

_LISTS = (nn.ModuleList, nn.ModuleDict)


def keep_experts_in_graph(model: nn.Module) -> None:
    """Give every expert a gradient in every backward pass, zero for one that was sent no token.

    It is zero on one process, too: with none, AdamW would leave the expert out of a step that it takes elsewhere.
    """
    for layer, experts in list(separate_experts(model)):
        layer.__dict__["forward"] = _using_all(experts, layer.forward)  # within the hooks that gather parameters


def set_zero3_leaf_modules(accelerator: Accelerator, model: nn.Module) -> None:
    """Have ZeRO-3 gather all experts of a layer when the layer is entered; call it before the model is prepared."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    kinds = {type(layer) for layer, _ in separate_experts(model)}
    if plugin is None or plugin.deepspeed_config["zero_optimization"]["stage"] != 3 or not kinds:
        return
    require("deepspeed.utils", extra="deepspeed", purpose="DeepSpeed ZeRO").set_z3_leaf_modules(model, list(kinds))


def separate_experts(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each module whose forward calls some of a list of experts, and that list."""
    for module in model.modules():
        for name, child in module.named_children():
            if "expert" in name and isinstance(child, _LISTS) and any(True for _ in child.parameters()):
                yield (child if _is_called(child) else module), child


def _is_called(experts: nn.Module) -> bool:
    """Return whether the list has a forward of its own; torch's lists have the one that raises."""
    return type(experts).forward is not nn.Module.forward


def _using_all(experts: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward with zero times a number of each trained parameter added to its input, the hidden states.

    At its input, so that in the backward pass all of them get their gradients last, and in one order on every rank:
    ZeRO-2 reduces gradients in the order in which they come.
    """

    def use_all(hidden: Tensor, *arguments: Any, **named: Any) -> Any:
        used = [parameter.flatten()[0] for parameter in experts.parameters() if parameter.requires_grad]
        if used and torch.is_grad_enabled():
            hidden = hidden + (0.0 * torch.stack(used).sum()).to(hidden.dtype)
        return forward(hidden, *arguments, **named)

    return use_all
