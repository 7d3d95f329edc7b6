"""LoRA layers whose forward and backward passes need few operations and keep no copy of their inputs.

peft computes `base(x) + B(A(dropout(x))) * scale` per layer: with dropout it keeps a copy of `x` and a mask for each
layer, and it creates the product with `B`, its multiple and the sum. Here layers with a common input (queries, keys and
values; gate and up) share its dropout mask and one product with their stacked `A`; the product with `B` is added to the
base's output in place, and the scale is part of a product. Only `x` itself is kept, and one bit of mask per element.
In the backward pass the products of layers with a common input are added into one gradient. All factors are cast to the
dtype of the products by one operation in each pass.

Weights are read where a strategy has gathered them, so the numbers are the same under every strategy and on quantized
bases. No module or parameter is renamed.

Of a layer that ranks share (`model/tensor_parallel.py`), one factor is a DTensor: `B` if they share the outputs, `A`
if they share the inputs. They draw the mask of all inputs, as one process does.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from finetune.model.adapters.context import ADAPTER_NAME
from finetune.model.adapters.products import AddProduct, InputGradient, LinearPlusProduct, MultiplyA
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
    casts = FactorCasts()
    for parent in list(model.modules()):
        layers: dict[str, Any] = {name: child for name, child in parent.named_children() if _is_plain(child)}
        for names in (*COMMON_INPUTS, *((name,) for name in tuple(layers))):
            shared = [layers.pop(name) for name in names if name in layers]
            common = CommonInput(shared)
            for position, layer in enumerate(shared):
                for factors in (layer.lora_A, layer.lora_B):
                    factors[ADAPTER_NAME].__class__ = Factor
                    casts.add(factors[ADAPTER_NAME])
                layer.__class__ = _single_pass_class(layer.__class__)
                layer.common_input, layer.position, layer.in_place = common, position, in_place
            if len(shared) > 1:
                parent.register_forward_hook(common.clear)
    for module in _called_modules(model):
        module.register_forward_pre_hook(casts.clear)


def _called_modules(model: Any) -> list[nn.Module]:
    """Return the model and the modules it wraps; every pass calls at least one, as peft may call `forward` alone."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return list(dict.fromkeys([model, inner, getattr(inner, "base_model", inner)]))


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

    casts: "FactorCasts"
    number: int  # of those that are cast together

    def forward(self, inputs: Tensor | None = None) -> Tensor:
        """Return the product with the inputs; without inputs a copy of the weight."""
        return self.weight.clone() if inputs is None else super().forward(inputs)

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return the weight, which gets the gradient, and its cast to the dtype of the product if it has another one.

        Under ZeRO-3, whose hooks gather it only while this module runs, a copy.
        """
        weight: Tensor = self() if hasattr(self.weight, "ds_id") else self.weight
        if isinstance(weight, DTensor):
            weight = weight.to_local()
        if weight is self.weight and weight.dtype != dtype and not torch.compiler.is_compiling():
            return weight, self.casts.read(self, dtype)
        return weight.to(dtype), None


class FactorCasts:
    """The factors of all adapters in the dtype of their products, cast together when a pass first needs one.

    Recomputation reads those of its forward pass.
    """

    def __init__(self) -> None:
        self._factors: list[Factor] = []
        self.clear()

    def add(self, factor: Factor) -> None:
        """Cast this factor, too."""
        factor.casts, factor.number = self, len(self._factors)
        self._factors.append(factor)

    def clear(self, *_: Any) -> None:
        """Forget all casts: a new pass begins, before which the factors may have changed."""
        self._casts: dict[int, tuple[Tensor, int]] = {}

    def read(self, factor: Factor, dtype: torch.dtype) -> Tensor:
        """Return the factor in this dtype, without its graph."""
        cast, version = self._casts.get(factor.number, (factor.weight, -1))
        if cast.dtype != dtype or version != factor.weight._version:
            self._cast_all(factor.weight.device, dtype)
            cast, _ = self._casts[factor.number]
        return cast

    @torch.no_grad()
    def _cast_all(self, device: torch.device, dtype: torch.dtype) -> None:
        """Cast the factors that are whole; those of layers with a common input are next to each other."""
        weights = {
            number: weight
            for number, weight in enumerate(factor.weight for factor in self._factors)
            if weight.device == device and not isinstance(weight, DTensor) and not hasattr(weight, "ds_id")
        }
        whole = torch.empty(sum(weight.numel() for weight in weights.values()), dtype=dtype, device=device)
        parts = whole.split_with_sizes([weight.numel() for weight in weights.values()])
        casts = [part.view(weight.shape) for part, weight in zip(parts, weights.values(), strict=True)]
        torch._foreach_copy_(casts, list(weights.values()))
        for number, cast in zip(weights, casts, strict=True):
            self._casts[number] = cast, weights[number]._version


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
        rows, hidden, input_gradient = self.common_input.take(self.position, x)
        factor, cast = self.lora_B[ADAPTER_NAME].read(hidden.dtype)
        is_compiling = torch.compiler.is_compiling()  # compiled code decides itself what it changes in place
        if input_gradient is not None and rows.dtype == hidden.dtype and _is_frozen_product(self.base_layer):
            base = self.base_layer
            result = LinearPlusProduct.apply(rows, base.weight, base.bias, hidden, factor, cast, input_gradient)  # type: ignore[no-untyped-call]
            return result.view(*x.shape[:-1], -1)
        # of two dimensions, since the result of more is a view, which is not changed in place; in their own dtype for
        # quantized layers, which return that of their inputs
        output = self.base_layer(rows if type(self.base_layer) is nn.Linear else x.reshape(-1, x.shape[-1]))
        is_in_place = self.in_place and not is_compiling and output.dtype == hidden.dtype and not output._is_view()
        result = AddProduct.apply(output, hidden, factor, cast, is_in_place)  # type: ignore[no-untyped-call]
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
        self._input_gradient: InputGradient | None = None

    def take(self, position: int, inputs: Tensor) -> tuple[Tensor, Tensor, InputGradient | None]:
        """Return the inputs as the base reads them, [rows, width], and their product with `A`, [rows, rank].

        And the gradient to which the base's backward pass adds its own. In compiled code there is none, and it
        multiplies the factor of this layer alone: dynamo compiles no changes of an object within gradient
        checkpointing.
        """
        if torch.compiler.is_compiling():
            rows, (hidden,) = self._multiply([position], inputs, None)
            return inputs.reshape(-1, inputs.shape[-1]) if rows is None else rows, hidden, None
        if position not in self._hidden or not self._has(inputs):
            settings = self.layers[position].settings()
            positions = [index for index, layer in enumerate(self.layers) if layer.settings() == settings]
            self._input_gradient = InputGradient()
            self._rows, products = self._multiply(positions, inputs, self._input_gradient)
            self._inputs, self._hidden = inputs, dict(zip(positions, products, strict=True))
        hidden, input_gradient = self._hidden.pop(position), self._input_gradient
        rows = self._rows if inputs is self._inputs else None
        if not self._hidden:
            self.clear()
        return inputs.reshape(-1, inputs.shape[-1]) if rows is None else rows, hidden, input_gradient

    def _has(self, inputs: Tensor) -> bool:
        """Return whether this is the tensor or, under ZeRO-3, whose hooks alias it for each layer, an alias of it."""
        if inputs is self._inputs or self._inputs is None:
            return self._inputs is not None
        is_zero3 = hasattr(self.layers[0].lora_A[ADAPTER_NAME].weight, "ds_id")
        one, other = inputs.untyped_storage(), self._inputs.untyped_storage()
        return is_zero3 and inputs.shape == self._inputs.shape and one._cdata == other._cdata

    def _multiply(
        self, positions: list[int], inputs: Tensor, input_gradient: InputGradient | None
    ) -> tuple[Tensor | None, Sequence[Tensor]]:
        """Return the inputs as the base may read them, if not as they are, and their products with these layers' `A`.

        All of these layers have the same settings. Products have the dtype of autocast, else that of inputs in half
        precision: under ZeRO, which keeps factors in float32, as under other strategies.
        """
        settings, device_type = self.layers[positions[0]].settings(), inputs.device.type
        modules = [self.layers[index].lora_A[ADAPTER_NAME] for index in positions]
        if is_autocast := torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        else:
            dtype = inputs.dtype if inputs.dtype in (torch.bfloat16, torch.float16) else modules[0].weight.dtype
        rows = inputs.reshape(-1, inputs.shape[-1]).to(dtype)
        weight = modules[0].weight
        mesh = weight.device_mesh if isinstance(weight, DTensor) else None  # of the ranks that share the inputs
        part = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
        factors, casts = zip(*(module.read(dtype) for module in modules), strict=True)
        of_casts = None if casts[0] is None else casts
        products = MultiplyA.apply(rows, *settings, part, of_casts, input_gradient, *factors)  # type: ignore[no-untyped-call]
        if mesh is not None:
            products = [gathered(product, mesh, Partial()) for product in products]
        return rows if is_autocast or dtype == inputs.dtype else None, products  # autocast would cast once per layer


def _is_frozen_product(base: Any) -> bool:
    """Return whether the layer is a product with a weight that is whole and frozen, and nothing else."""
    if type(base) is not nn.Linear or "forward" in vars(base) or base._forward_hooks or base._forward_pre_hooks:
        return False
    is_whole = not isinstance(base.weight, DTensor) and not hasattr(base.weight, "ds_id")
    return is_whole and not any(parameter.requires_grad for parameter in base.parameters())
