"""The products of LoRA layers and of routed experts, with backward passes that keep and write little.

LoRA on the matrices of routed experts is computed as grouped products over the tokens sorted by expert. peft's
ParamWrapper computes `W + BA` of every expert in each forward pass and the gradient of that sum, which is as large as
that of full training. Here a token of an expert costs `W x + B (A x)`, as on a linear layer: no matrix of the experts'
size is computed or stored. Parameters, their names, merging and saving remain peft's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from finetune.model.upstream import grouped_product, is_grouped


class InputGradient:
    """The gradient of a common input, to which the backward pass of each layer adds its product in place."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, gradient: Tensor, weight: Tensor) -> None:
        """Add the product."""
        self._sum = gradient @ weight if self._sum is None else self._sum.addmm_(gradient, weight)

    def take(self) -> Tensor | None:
        """Return the sum and forget it; None if no layer added to it."""
        total, self._sum = self._sum, None
        return total


class MultiplyA(torch.autograd.Function):
    """`dropout(rows) A^T * scale` for each `A`, [rank, width]; keeps rows and the mask, but not their product.

    `part` is (rank, size) of the tensor-parallel group: the mask is drawn for the rows of all its ranks, and each takes
    its own. `casts` holds the factors in the dtype of the rows, if theirs is another.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        scale: float,
        dropout: float,
        part: tuple[int, int],
        casts: tuple[Tensor, ...] | None,
        input_gradient: InputGradient | None,
        *factors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the products, [rows, rank] each."""
        mask, ctx.scale = None, scale / (1 - dropout)
        kept = rows
        if dropout:
            mask = torch.empty((len(rows), part[1], rows.shape[1]), dtype=torch.bool, device=rows.device)
            mask = mask.bernoulli_(1 - dropout)[:, part[0]].contiguous()
            kept = rows * mask
            mask = _pack(mask)
        ctx.input_gradient, ctx.dtype = input_gradient, factors[0].dtype
        values = factors if casts is None else casts
        ctx.casts = casts  # which offloading would take for activations
        ctx.save_for_backward(rows, mask, *(factors if casts is None else ()))
        products = _scaled_product(kept, _stack(values).T, ctx.scale)
        return tuple(products.split_with_sizes([len(each) for each in values], -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows and factors."""
        rows, mask, *factors = ctx.saved_tensors
        values = factors if ctx.casts is None else ctx.casts
        mask = None if mask is None else _unpack(mask, rows)
        of_products = _stack(gradients, -1)
        of_rows: Tensor | None = None
        of_factors: Sequence[Tensor | None] = [None] * len(values)
        if any(ctx.needs_input_grad[6:]):
            kept = rows if mask is None else rows * mask
            stacked = _scaled_product(of_products.T, kept, ctx.scale).to(ctx.dtype)
            of_factors = stacked.split_with_sizes([len(each) for each in values])
            del kept
        if ctx.needs_input_grad[0]:
            of_rows = None if ctx.input_gradient is None else ctx.input_gradient.take()
            if of_rows is not None and mask is None:
                of_rows.addmm_(of_products, _stack(values), alpha=ctx.scale)
            else:
                of_adapters = _scaled_product(of_products, _stack(values), ctx.scale)
                of_adapters = of_adapters if mask is None else of_adapters.mul_(mask)
                of_rows = of_adapters if of_rows is None else of_rows.add_(of_adapters)
        return of_rows, None, None, None, None, None, *of_factors


def _linear_plus_product(rows: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor, factor: Tensor) -> Tensor:
    output = functional.linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype))
    return output.addmm_(hidden, factor.T)


def _plus_product(output: Tensor, hidden: Tensor, factor: Tensor) -> Tensor:
    return torch.addmm(output.to(hidden.dtype), hidden, factor.T).to(output.dtype)


# Selective checkpointing (`model/activations.py`) saves the output of the first operator, and recomputes the second.
for schema, function in (
    (
        "linear_plus_product(Tensor rows, Tensor weight, Tensor? bias, Tensor hidden, Tensor factor)",
        _linear_plus_product,
    ),
    ("plus_product(Tensor output, Tensor hidden, Tensor factor)", _plus_product),
):
    name, _, parameters = schema.partition("(")
    torch.library.define(f"finetune::{name}", f"({parameters} -> Tensor")
    torch.library.impl(f"finetune::{name}", "CompositeExplicitAutograd", function)


@register_flop_formula(torch.ops.finetune.linear_plus_product)
def _flops_of_sum(rows: Any, weight: Any, bias: Any, hidden: Any, factor: Any, **_: Any) -> int:
    flops: int = 2 * rows[0] * (weight[0] * weight[1] + factor[0] * factor[1])
    return flops


class LinearPlusProduct(torch.autograd.Function):
    """`rows W^T + bias + hidden B^T` by one operator, [rows, outputs]; weight and bias are frozen.

    The gradient of the rows is added to that of the common input, which `MultiplyA` returns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hidden: Tensor,
        factor: Tensor,
        cast: Tensor | None,
        input_gradient: InputGradient,
    ) -> Tensor:
        """Return the sum; `cast` is that of the factor to the dtype of the rows if it has another one."""
        values = factor if cast is None else cast
        ctx.cast = cast
        ctx.save_for_backward(weight, hidden, factor if cast is None else None)
        ctx.input_gradient, ctx.dtype = input_gradient, factor.dtype
        result: Tensor = torch.ops.finetune.linear_plus_product(rows, weight, bias, hidden, values)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of product and factor."""
        weight, hidden, factor = ctx.saved_tensors
        values = factor if ctx.cast is None else ctx.cast
        if ctx.needs_input_grad[0]:
            ctx.input_gradient.add(gradient, weight.to(gradient.dtype))
        of_hidden = gradient @ values if ctx.needs_input_grad[3] else None
        of_factor = _gradient_of_b(gradient, hidden, ctx.dtype) if ctx.needs_input_grad[4] else None
        return None, None, None, of_hidden, of_factor, None, None


class AddProduct(torch.autograd.Function):
    """`output + hidden B^T` in the dtype of the output, [rows, outputs]."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, hidden: Tensor, factor: Tensor, cast: Tensor | None, in_place: bool
    ) -> Tensor:
        """Return the sum, in place or not; `cast` is that of the factor to the dtype of the product, if it has one."""
        values = factor if cast is None else cast
        ctx.cast = cast
        ctx.save_for_backward(hidden, factor if cast is None else None)
        ctx.dtype = factor.dtype
        if in_place:
            ctx.mark_dirty(output)
            return output.addmm_(hidden, values.T)
        add = _plus_product if torch.compiler.is_compiling() else torch.ops.finetune.plus_product
        result: Tensor = add(output, hidden, values)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of output, product and factor."""
        hidden, factor = ctx.saved_tensors
        values = factor if ctx.cast is None else ctx.cast
        of_sum = gradient.to(hidden.dtype)
        of_hidden = of_sum @ values if ctx.needs_input_grad[1] else None
        of_factor = _gradient_of_b(of_sum, hidden, ctx.dtype) if ctx.needs_input_grad[2] else None
        return gradient, of_hidden, of_factor, None, None


def _gradient_of_b(gradient: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product in the dtype of the factor, in which a GPU accumulates it anyway."""
    if gradient.is_cuda and gradient.dtype != dtype == torch.float32:
        return torch.mm(gradient.T, hidden, out_dtype=dtype)
    return (gradient.T @ hidden).to(dtype)


def _stack(tensors: Sequence[Tensor], dimension: int = 0) -> Tensor:
    """Return the tensors as one; as a view if they are rows that follow each other in one storage."""
    if len(tensors) == 1:  # as in compiled code, which cannot read offsets
        return tensors[0]
    first, end = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        is_next = dimension == 0 and tensor.is_contiguous() and tensor.storage_offset() == end
        if not is_next or tensor.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return torch.cat(list(tensors), dimension)
        end += tensor.numel()
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def _scaled_product(one: Tensor, other: Tensor, scale: float) -> Tensor:
    """Return the product times the scale in one operation: with `beta=0` the first argument is not read."""
    return torch.addmm(one.new_empty(()), one, other, beta=0, alpha=scale)


def _pack(mask: Tensor) -> Tensor:
    """Return the mask with 8 elements per byte, if there is a whole number of bytes.

    Bit i of a byte's 8 elements, of one byte each, is moved to bit 56 + i of their product; there is no carry.
    """
    if mask.numel() % 8:
        return mask
    return (mask.view(-1).view(torch.int64) * 0x0102040810204080).view(torch.uint8)[7::8].clone()


def _unpack(packed: Tensor, like: Tensor) -> Tensor:
    if packed.dtype == torch.bool:
        return packed
    bits = (packed.to(torch.int64) * 0x0101010101010101).bitwise_and_(0x8040201008040201 - (1 << 64))
    return bits.view(torch.uint8).ne(0).view(like.shape)


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
