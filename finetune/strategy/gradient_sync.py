"""Gradients that ranks reduce: after every microbatch of a step or only after its last, and of every expert.

Reducing once saves communication. Under FSDP it costs memory: until then, each rank keeps the gradient of the whole
model instead of a shard (`FSDPParam.unsharded_accumulated_grad` in torch 2.13). So it is done only if that fits. Under
DDP and ZeRO-1 every rank has the whole gradient in any case, and ZeRO-2 and -3 reduce immediately, into a sharded
gradient.

Experts that are separate modules need a gradient on every rank. If all experts of a layer are one parameter, as in
nearly every model of transformers 5, each rank uses all of it and nothing applies. If they are modules in a list
(Switch Transformers, NLLB, code from the hub), ranks call only the experts of their tokens: DDP and FSDP2
wait for gradients that only some ranks have, and ZeRO-3 gathers parameters that other ranks do not request.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from finetune.runtime.optional import require
from finetune.runtime.resources import format_size


class GradientReduction(Enum):
    """The microbatches of a step after which a strategy can reduce gradients."""

    LAST = "last"
    EVERY = "every"
    EITHER = "either"


@dataclass(frozen=True)
class Accumulation:
    """How the gradients of a step's microbatches are accumulated."""

    reduces_every_microbatch: bool
    unsharded_gradient_bytes: int = 0  # that each rank needs in addition to its shard
    reason: str | None = None  # for the log; None without a choice


def choose_accumulation(
    reduction: GradientReduction,
    *,
    num_batches: int,
    num_processes: int,
    unsharded_bytes: int,
    free_bytes: int,
    is_deterministic: bool = False,
    has_bf16_shards: bool = False,
) -> Accumulation:
    """Return how to accumulate `num_batches` microbatches.

    `unsharded_bytes` is the size of the whole gradient, `free_bytes` the free memory of the rank with the least, after
    weights, sharded gradients and optimizer state. The gradient may take half of it: the rest is for activations. The
    choice of a deterministic run does not depend on the free memory, since it affects the order of the sum. If trained
    parameters are bfloat16, so are the shards of their gradient, whose sum over microbatches loses precision, so this
    is the last resort.
    """
    if reduction is not GradientReduction.EITHER or num_batches == 1:
        is_every = reduction is GradientReduction.EVERY
        return Accumulation(is_every)
    whole = f"the whole gradient of {format_size(unsharded_bytes)}"
    every = f"gradient accumulation: gradients are reduced after each of the {num_batches} microbatches"
    left = format_size(max(0, free_bytes))
    if num_processes == 1 and not has_bf16_shards:
        return Accumulation(True, reason=f"{every}, which needs no communication with one process")
    if is_deterministic and not has_bf16_shards:
        return Accumulation(True, reason=f"{every}, so that a deterministic run does not depend on the free memory")
    if 2 * unsharded_bytes > free_bytes:
        why = f"since {whole} on each rank would take more than half of the {left} left for activations"
        note = "; their sum is kept in bfloat16, like the weights" if has_bf16_shards else ""
        return Accumulation(True, reason=f"{every}, {why}{note}")
    once = f"gradient accumulation: gradients are reduced once a step; until then each rank keeps {whole}"
    return Accumulation(False, unsharded_bytes, reason=f"{once}, of the {left} left")


def fsdp2_plugin(accelerator: Accelerator) -> Any:
    """Return Accelerate's settings of FSDP; None under any strategy but FSDP2."""
    return getattr(accelerator.state, "fsdp_plugin", None) if accelerator.is_fsdp2 else None


@contextmanager
def accumulate_gradients(accelerator: Accelerator, model: Any, *, reduces: bool = False) -> Iterator[None]:
    """Accumulate the gradients of a microbatch that is not the last of its step, reduced or local.

    Reduced gradients are summed in the shard of each rank. With `fsdp_reshard_after_forward: false`, FSDP2 also keeps
    the parameters unsharded for the next microbatch, so that each layer is gathered once a step. HSDP also reduces over
    the copies: otherwise torch accumulates by the offset in a buffer, which is wrong if a microbatch leaves a parameter
    without a gradient (`partial_reduce_output`, torch 2.13).
    """
    with nullcontext() if reduces else accelerator.no_sync(model):
        plugin = fsdp2_plugin(accelerator)
        if plugin is None or plugin.reshard_after_forward is not False:
            yield
            return
        model.set_reshard_after_backward(False)
        try:
            yield
        finally:
            model.set_reshard_after_backward(True)


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
