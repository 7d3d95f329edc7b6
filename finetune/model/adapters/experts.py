"""LoRA on the matrices of routed experts, as grouped products over the tokens sorted by expert.

peft's ParamWrapper computes `W + BA` of every expert in each forward pass and the gradient of that sum, which is as
large as that of full training. Here a token of an expert costs `W x + B (A x)`, as on a linear layer: no matrix of the
experts' size is computed or stored. Parameters, their names, merging and saving remain peft's.
"""

from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor
from torch.nn import functional

from finetune.model.upstream import grouped_product, is_grouped

_ALIGNMENT = 8
"""Ranks are padded to a multiple with zeros: torch's grouped product needs rows of a multiple of 16 bytes."""


def group_expert_adapters(model: PeftModel) -> int:
    """Compute the adapters of routed experts as grouped products; return the number of layers.

    Not where the model's own experts are not grouped: code that transformers does not dispatch, or a config that sets
    another `experts_implementation`. peft's way remains there.
    """
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    inner = {id(wrapper.base_layer) for wrapper in wrappers}
    outer = [wrapper for wrapper in wrappers if id(wrapper) not in inner and is_grouped(wrapper.get_base_layer())]
    for wrapper in outer:
        wrapper.__class__ = GroupedExperts
    return len(outer)


class GroupedExperts(ParamWrapper):  # type: ignore[misc]  # peft has no types for it
    """The outermost of peft's nested wrappers around the experts of a layer."""

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the sum of each token's experts, [tokens, width], by peft where adapters are merged or several.

        It is what transformers' `grouped_mm_experts_forward` returns for the matrices `W + BA`.
        """
        wrappers: dict[str, ParamWrapper] = {}
        experts: Any = self
        while isinstance(experts, ParamWrapper):
            wrappers[experts.parameter_name] = experts
            experts = experts.base_layer
        if any(one.disable_adapters or one.merged or len(one.active_adapters) != 1 for one in wrappers.values()):
            return super().forward(hidden, top_k_index, top_k_weights)  # type: ignore[no-any-return]  # likewise
        num_tokens, top_k = top_k_index.shape
        expert_ids, order = top_k_index.reshape(-1).sort()  # [tokens x top_k]
        numbers = torch.arange(experts.num_experts, device=expert_ids.device)
        ends = torch.searchsorted(expert_ids, numbers, right=True, out_int32=True)  # [experts]

        def product(inputs: Tensor, name: str) -> Tensor:
            weight, bias = getattr(experts, name), getattr(experts, f"{name}_bias", None)
            outputs = grouped_product(inputs, weight if experts.is_transposed else weight.mT, ends)
            if name in wrappers:
                outputs = outputs + _low_rank_product(inputs.to(weight.dtype), wrappers[name], ends)
            return outputs if bias is None else outputs + bias[expert_ids]

        values = hidden[order // top_k]
        if experts.has_gate:
            values = experts._apply_gate(product(values, "gate_up_proj"))
        else:
            values = experts.act_fn(product(values, "up_proj"))
        values = product(values, "down_proj")
        if experts.has_post_expert_norm:
            values = experts.post_expert_norm(values)
        values = values * top_k_weights.reshape(-1)[order, None]
        values = values[order.argsort()].view(num_tokens, top_k, -1).sum(dim=1)
        return values.to(hidden.dtype)


def _low_rank_product(inputs: Tensor, wrapper: ParamWrapper, ends: Tensor) -> Tensor:
    """Return `scaling B (A x)` of each token's expert, [tokens, outputs]."""
    (adapter,) = wrapper.active_adapters
    down = wrapper.lora_A[adapter].weight.to(inputs.dtype).unflatten(0, (wrapper.num_experts, -1))
    up = wrapper.lora_B[adapter].weight.to(inputs.dtype).unflatten(1, (-1, wrapper.num_experts)).permute(2, 1, 0)
    if missing := -down.shape[1] % _ALIGNMENT:
        down, up = (functional.pad(factor, (0, 0, 0, missing)) for factor in (down, up))  # [experts, rank, width]
    return grouped_product(grouped_product(inputs, down.mT, ends), up.contiguous() * wrapper.scaling[adapter], ends)
