"""LoRA layers whose forward and backward passes need few operations and keep no copy of their inputs.

peft computes `base(x) + B(A(dropout(x))) * scale` per layer: with dropout it keeps a copy of `x` and a mask for each
layer, and it creates the product with `B`, its multiple and the sum. Here layers with a common input (queries, keys and
values; gate and up) share its dropout mask and one product with their stacked `A`; the product with `B` is added to the
base's output in place, and the scale is part of a product. Only `x` itself is kept, and one bit of mask per element.

The base's product is left to its layer, and weights are read where a strategy has gathered them, so the numbers are the
same under every strategy and on quantized bases. No module or parameter is renamed.

Of a layer that ranks share (`model/tensor_parallel.py`), one factor is a DTensor: `B` if they share the outputs, `A`
if they share the inputs. They draw the mask of all inputs, as one process does.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from finetune.model.adapters.context import ADAPTER_NAME
from finetune.runtime.parallel import gathered

COMMON_INPUTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("q", "k", "v"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
"""Names of layers of one module that read the same tensor. If they do not, as in cross-attention, nothing is
shared: tensors are compared, too."""

_QUANTIZED = ("Linear4bit", "Linear8bitLt", "GPTQLoraLinear", "AwqLoraLinear", "HqqLoraLinear", "EetqLoraLinear")
"""peft's LoRA layers on quantized ones, which are not subclasses of its `Linear`."""


def use_single_pass(model: nn.Module, *, in_place: bool) -> None:
    """Give LoRA layers on linear ones the forward pass of this module; other adapters and DoRA keep that of peft.

    `in_place`: add to the base's output in place; not under selective checkpointing, which keeps one of both.
    """
    for parent in list(model.modules()):
        layers: dict[str, Any] = {name: child for name, child in parent.named_children() if _is_plain(child)}
        for names in (*COMMON_INPUTS, *((name,) for name in tuple(layers))):
            shared = [layers.pop(name) for name in names if name in layers]
            common = CommonInput(shared)
            for position, layer in enumerate(shared):
                for factors in (layer.lora_A, layer.lora_B):
                    factors[ADAPTER_NAME].__class__ = Factor
                layer.__class__ = _single_pass_class(layer.__class__)
                layer.common_input, layer.position, layer.in_place = common, position, in_place
            if len(shared) > 1:
                parent.register_forward_hook(common.clear)


def _is_plain(layer: Any) -> bool:
    is_linear = isinstance(layer, lora.Linear) or type(layer).__name__ in _QUANTIZED
    if not (is_linear and isinstance(layer, lora.LoraLayer)) or layer.lora_variant:
        return False
    factors = [dict(modules.items()).get(ADAPTER_NAME) for modules in (layer.lora_A, layer.lora_B)]
    return all(type(factor) is nn.Linear and factor.bias is None for factor in factors)


@cache
def _single_pass_class(peft_class: Any) -> type:
    return type(peft_class.__name__, (SinglePassLayer, peft_class), {})


class Factor(nn.Linear):
    """The matrix `A` or `B` of an adapter."""

    def forward(self, inputs: Tensor | None = None) -> Tensor:
        """Return the product with the inputs; without inputs a copy of the weight."""
        return self.weight.clone() if inputs is None else super().forward(inputs)

    def read(self) -> Tensor:
        """Return the weight; under ZeRO-3, whose hooks gather it only while this module runs, a copy."""
        return self() if hasattr(self.weight, "ds_id") else self.weight


class SinglePassLayer:
    """The forward pass of a LoRA layer; where its adapter is disabled, merged or one of several, that of peft."""

    common_input: "CommonInput"
    position: int
    in_place: bool

    def settings(self: Any) -> tuple[float, float] | None:
        """Return scale and dropout of the adapter; None if peft's forward pass is needed."""
        if self.disable_adapters or self.merged or list(self.active_adapters) != [ADAPTER_NAME]:
            return None
        if type(self.lora_A[ADAPTER_NAME]) is not Factor or type(self.lora_B[ADAPTER_NAME]) is not Factor:
            return None  # sharded alone, and gathered only while it runs
        dropout = self.lora_dropout[ADAPTER_NAME]
        is_dropping = isinstance(dropout, nn.Dropout) and dropout.training
        return self.scaling[ADAPTER_NAME], dropout.p if is_dropping else 0.0

    def forward(self: Any, x: Tensor, *others: Any, **named: Any) -> Tensor:
        """Return `base(x) + B A dropout(x) * scale`."""
        result: Tensor
        if others or named or self.settings() is None:
            result = super().forward(x, *others, **named)  # type: ignore[misc]
            return result
        rows, hidden = self.common_input.take(self.position, x)
        is_compiling = torch.compiler.is_compiling()  # compiled code decides itself what it changes in place
        saves_sum = not self.in_place and not is_compiling and rows.dtype == hidden.dtype
        if saves_sum and _is_frozen_product(self.base_layer):
            base, factor = self.base_layer, self.lora_B[ADAPTER_NAME].weight
            result = LinearPlusProduct.apply(rows, base.weight, base.bias, hidden, factor.to(hidden.dtype))  # type: ignore[no-untyped-call]
            return result.view(*x.shape[:-1], -1)
        # of two dimensions, since the result of more is a view, which is not changed in place; in their own dtype for
        # quantized layers, which return that of their inputs
        output = self.base_layer(rows if type(self.base_layer) is nn.Linear else x.reshape(-1, x.shape[-1]))
        is_in_place = self.in_place and not is_compiling and output.dtype == hidden.dtype and not output._is_view()
        factor = self.lora_B[ADAPTER_NAME].read()
        if isinstance(factor, DTensor):
            factor = factor.to_local()
        result = AddProduct.apply(output, hidden, factor.to(hidden.dtype), is_in_place)  # type: ignore[no-untyped-call]
        return result.view(*x.shape[:-1], -1)


class CommonInput:
    """The layers of one module that may read the same tensor, and its products with `A` that are not yet used."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.clear()

    def clear(self, *_: Any) -> None:
        """Forget the tensor; in compiled code there is none."""
        if torch.compiler.is_compiling():
            return
        self._inputs: Tensor | None = None
        self._rows: Tensor | None = None
        self._hidden: dict[int, Tensor] = {}

    def take(self, position: int, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs as the base reads them, [rows, width], and their product with `A`, [rows, rank].

        Compiled code multiplies the factor of this layer alone: dynamo compiles no changes of an object within gradient
        checkpointing.
        """
        if torch.compiler.is_compiling():
            rows, (hidden,) = self._multiply([position], inputs)
            return inputs.reshape(-1, inputs.shape[-1]) if rows is None else rows, hidden
        if position not in self._hidden or not self._has(inputs):
            settings = self.layers[position].settings()
            positions = [index for index, layer in enumerate(self.layers) if layer.settings() == settings]
            self._rows, products = self._multiply(positions, inputs)
            self._inputs, self._hidden = inputs, dict(zip(positions, products, strict=True))
        hidden = self._hidden.pop(position)
        rows = self._rows if inputs is self._inputs else None
        if not self._hidden:
            self.clear()
        return inputs.reshape(-1, inputs.shape[-1]) if rows is None else rows, hidden

    def _has(self, inputs: Tensor) -> bool:
        """Return whether this is the tensor or, under ZeRO-3, whose hooks alias it for each layer, an alias of it."""
        if inputs is self._inputs or self._inputs is None:
            return self._inputs is not None
        is_zero3 = hasattr(self.layers[0].lora_A[ADAPTER_NAME].weight, "ds_id")
        one, other = inputs.untyped_storage(), self._inputs.untyped_storage()
        return is_zero3 and inputs.shape == self._inputs.shape and one._cdata == other._cdata

    def _multiply(self, positions: list[int], inputs: Tensor) -> tuple[Tensor | None, Sequence[Tensor]]:
        """Return the inputs as the base may read them, if not as they are, and their products with these layers' `A`.

        All of these layers have the same settings.
        """
        settings = self.layers[positions[0]].settings()
        factors = [self.layers[index].lora_A[ADAPTER_NAME].read() for index in positions]
        is_autocast = torch.is_autocast_enabled(inputs.device.type)
        dtype = torch.get_autocast_dtype(inputs.device.type) if is_autocast else factors[0].dtype
        rows = inputs.reshape(-1, inputs.shape[-1]).to(dtype)
        mesh = factors[0].device_mesh if isinstance(factors[0], DTensor) else None  # of the ranks that share the inputs
        part = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
        factors = [(factor if mesh is None else factor.to_local()).to(dtype) for factor in factors]
        products = MultiplyA.apply(rows, *settings, part, *factors)  # type: ignore[no-untyped-call]
        if mesh is not None:
            products = [gathered(product, mesh, Partial()) for product in products]
        return rows if is_autocast or dtype == inputs.dtype else None, products  # autocast would cast once per layer


class MultiplyA(torch.autograd.Function):
    """`dropout(rows) A^T * scale` for each `A`, [rank, width]; keeps rows and the mask, but not their product.

    The rows are a part of the inputs, the first number of as many equal ones as the second; the mask is that of all.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, scale: float, dropout: float, part: tuple[int, int], *factors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the products, [rows, rank] each."""
        mask, ctx.scale = None, scale / (1 - dropout)
        kept = rows
        if dropout:
            mask = torch.empty((len(rows), part[1], rows.shape[1]), dtype=torch.bool, device=rows.device)
            mask = mask.bernoulli_(1 - dropout)[:, part[0]].contiguous()
            kept = rows * mask
            mask = _pack(mask)
        ctx.save_for_backward(rows, mask, *factors)
        products = _scaled_product(kept, _stack(factors).T, ctx.scale)
        return tuple(products.split_with_sizes([len(factor) for factor in factors], -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows and factors."""
        rows, mask, *factors = ctx.saved_tensors
        mask = None if mask is None else _unpack(mask, rows)
        of_products = _stack(gradients, -1)
        of_rows: Tensor | None = None
        of_factors: Sequence[Tensor | None] = [None] * len(factors)
        if any(ctx.needs_input_grad[4:]):
            kept = rows if mask is None else rows * mask
            stacked = _scaled_product(of_products.T, kept, ctx.scale)
            of_factors = stacked.split_with_sizes([len(factor) for factor in factors])
            del kept
        if ctx.needs_input_grad[0]:
            of_rows = _scaled_product(of_products, _stack(factors), ctx.scale)
            of_rows = of_rows if mask is None else of_rows.mul_(mask)
        return of_rows, None, None, None, *of_factors


def _is_frozen_product(base: Any) -> bool:
    """Return whether the layer is a product with a weight that is whole and frozen, and nothing else."""
    if type(base) is not nn.Linear or "forward" in vars(base):
        return False
    is_whole = not isinstance(base.weight, DTensor) and not hasattr(base.weight, "ds_id")
    return is_whole and not any(parameter.requires_grad for parameter in base.parameters())


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
    """`rows W^T + bias + hidden B^T` by one operator, [rows, outputs]; weight and bias are frozen."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor, factor: Tensor) -> Tensor:
        """Return the sum."""
        ctx.save_for_backward(weight, hidden, factor)
        result: Tensor = torch.ops.finetune.linear_plus_product(rows, weight, bias, hidden, factor)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows, product and factor."""
        weight, hidden, factor = ctx.saved_tensors
        of_rows = gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        of_hidden = gradient @ factor if ctx.needs_input_grad[3] else None
        of_factor = gradient.T @ hidden if ctx.needs_input_grad[4] else None
        return of_rows, None, None, of_hidden, of_factor


class AddProduct(torch.autograd.Function):
    """`output + hidden B^T` in the dtype of the output, [rows, outputs]."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, hidden: Tensor, factor: Tensor, in_place: bool) -> Tensor:
        """Return the sum, in place or not."""
        ctx.save_for_backward(hidden, factor)
        if in_place:
            ctx.mark_dirty(output)
            return output.addmm_(hidden, factor.T)
        add = _plus_product if torch.compiler.is_compiling() else torch.ops.finetune.plus_product
        result: Tensor = add(output, hidden, factor)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of output, product and factor."""
        hidden, factor = ctx.saved_tensors
        of_sum = gradient.to(hidden.dtype)
        of_hidden = of_sum @ factor if ctx.needs_input_grad[1] else None
        of_factor = of_sum.T @ hidden if ctx.needs_input_grad[2] else None
        return gradient, of_hidden, of_factor, None


def _stack(tensors: Any, dimension: int = 0) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dimension)


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
