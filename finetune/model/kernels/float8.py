"""Products of linear layers in 8-bit floats (Micikevicius et al., 2022, arXiv:2209.05433), of trained ones by torchao.

Weights, gradients and the optimizer's state keep their dtypes, so checkpoints and exports are as in bf16: inputs,
weights and output gradients are rounded to 8 bits for each product, with scales computed from their largest values. No
module or parameter is replaced: a layer gets another `forward`. Evaluation and generation compute in bf16.

A frozen weight is cast once, with a scale per row, and needs two products, none for a gradient that nobody needs. A
product casts its other operand, with a scale per token: in the forward pass the inputs; in the backward pass the output
gradient, multiplied by the weight's scales first, so that the same 8-bit values serve both. torchao (0.18) casts the
weight in every pass and computes its gradient, too.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from finetune.config.sections.train import Fp8Section, TrainSection
from finetune.runtime.optional import lazily, require

with lazily():
    from torchao.float8 import distributed_utils as tensors
    from torchao.float8 import fsdp_utils

MIN_CAPABILITY = (8, 9)
"""The compute capability of the first NVIDIA GPUs that multiply 8-bit floats (Ada); of AMD's, MI300 reports 9.4."""

_MULTIPLE = 16
"""The kernels need weights whose sides are multiples of this."""

_IN_BF16 = ("gate", "router", "score", "classifier")
"""Layers that stay in bf16: a router's choice of experts is not continuous, and heads are the most sensitive layers."""


def missing_fp8_requirement(device: torch.device, section: Fp8Section) -> str | None:
    """Return the requirement of 8-bit products that this device does not meet; None if they run."""
    if section.emulate:
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY:
        return None
    return "a GPU that multiplies 8-bit floats: of compute capability 8.9 (Ada, Hopper) or newer"


def convert_linear_layers(model: Any, section: Fp8Section, *, casts_frozen: bool = False) -> int:
    """Make the linear layers of the model's body multiply in 8 bits while they train; return their number.

    Left out: the head, adapters, routers, and layers whose sides are not multiples of 16. With `casts_frozen`, frozen
    weights are cast once. Raises MissingPackage if others need torchao and it is not installed.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    frozen: list[nn.Linear] = []
    layers: list[Any] = []
    for name, module in model.base_model.named_modules():
        is_kept = ".lora_" in name or "modules_to_save" in name or name.rpartition(".")[2] in _IN_BF16
        if is_kept or module is head or type(module) is not nn.Linear:
            continue
        if module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0:
            is_frozen = casts_frozen and not any(weight.requires_grad for weight in module.parameters())
            (frozen if is_frozen else layers).append(module)
    for layer in frozen:
        multiply_in_8_bits(layer, emulate=section.emulate)
    if layers:
        _convert_by_torchao(layers, section)
    return len(frozen) + len(layers)


def _convert_by_torchao(layers: list[Any], section: Fp8Section) -> None:
    torchao = require("torchao.float8", extra="torchao", purpose="`train.precision: fp8`")
    recipe = torchao.Float8LinearConfig.from_recipe_name(section.recipe)
    fields = {name: getattr(recipe, name) for name in recipe.__dataclass_fields__}
    # rows of any number of tokens: the weight's gradient sums over them
    config = torchao.Float8LinearConfig(**{**fields, "emulate": section.emulate, "pad_inner_dim": True})
    for layer in layers:
        converted: Any = torchao.convert_to_float8_training(layer, config=config)  # another module, the same parameters
        layer.config, layer.linear_mm_config = converted.config, converted.linear_mm_config
        layer.forward = partial(_forward, layer, type(converted).forward)


def _forward(layer: Any, multiply: Any, inputs: Tensor) -> Tensor:
    device_type = inputs.device.type
    if torch.is_autocast_enabled(device_type):  # torchao 0.18 looks at CUDA's alone
        inputs = inputs.to(torch.get_autocast_dtype(device_type))
    if layer.training or tensors.tensor_already_casted_to_fp8(layer.weight):  # gathered in 8 bits
        outputs: Tensor = multiply(layer, inputs)
        return outputs
    return functional.linear(inputs, layer.weight, layer.bias)


def gather_in_8_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Make FSDP2 gather the trained weights of converted layers as 8-bit floats; return their number.

    After each update one reduction finds the scales of all of them. Only with one scale per tensor, and where ranks
    hold equal shards on the device; elsewhere weights are gathered in bf16. Collective in each step.
    """
    groups = [
        module._get_fsdp_state()._fsdp_param_group for module in model.modules() if isinstance(module, FSDPModule)
    ]
    parameters = [parameter for group in groups if group is not None for parameter in group.fsdp_params]
    shards = [shard for parameter in parameters if (shard := _Shard.of(parameter)) is not None]
    if shards:
        inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper calls no hooks
        inner.register_step_post_hook(lambda *_: _compute_scales(shards))
        _compute_scales(shards)
    return len(shards)


class _Shard:
    """The part of a weight on this rank. It stays a plain DTensor, whose local tensor gets FSDP2's two methods.

    torchao itself makes the parameter a tensor of its own class, which checkpoints, averages and Accelerate's loading
    on rank 0 would have to know (accelerate 1.15 refuses the last).
    """

    def __init__(self, parameter: Any, layer: Any) -> None:
        self.local: Any = parameter.sharded_param._local_tensor
        self.group = parameter.mesh_info.shard_process_group
        self.dtype = layer.config.cast_config_weight.target_dtype
        self._cast: Any = fsdp_utils.WeightWithDynamicFloat8CastTensor(self.local, layer.linear_mm_config, self.dtype)
        self._version = -1
        self.local.fsdp_pre_all_gather = self._before_gather
        self.local.fsdp_post_all_gather = self._cast.fsdp_post_all_gather
        parameter._init_extensions()

    @classmethod
    def of(cls, parameter: Any) -> "_Shard | None":
        layer, weight = parameter._module_info.module, parameter.sharded_param
        config = getattr(layer, "config", None) if hasattr(layer, "linear_mm_config") else None
        if config is None or parameter._module_info.param_name != "weight" or not weight.requires_grad:
            return None
        is_even = weight._local_tensor.size() == parameter.padded_sharded_param_size and not parameter.offload_to_cpu
        is_tensorwise = config.cast_config_weight.scaling_granularity.value == "tensorwise"
        return cls(parameter, layer) if is_even and is_tensorwise else None

    def set_scale(self, scale: Tensor) -> None:
        """Use this scale until the weight changes."""
        self._cast._precomputed_scale, self._version = scale, self.local._version

    def _before_gather(self, mesh: Any) -> Any:
        if self.local._version != self._version:  # loaded or averaged since: torchao finds the scale itself
            self._cast._precomputed_scale = None
        return self._cast.fsdp_pre_all_gather(mesh)


@torch.no_grad()
def _compute_scales(shards: list[_Shard]) -> None:
    """Set the scale of each weight from its largest value over all shards. Collective."""
    largest = torch.stack(torch._foreach_norm([shard.local for shard in shards], math.inf)).float()
    torch.distributed.all_reduce(largest, ReduceOp.MAX, group=shards[0].group)
    scales = (torch.finfo(shards[0].dtype).max / largest.double().clamp(min=1e-12)).float()
    for shard, scale in zip(shards, scales, strict=True):
        shard.set_scale(scale)


DTYPE = torch.float8_e4m3fn
_MAX = torch.finfo(DTYPE).max


def casts_frozen_weights(train: TrainSection, *, strategy: str, compiled: str) -> bool:
    """Return whether frozen weights are cast once: where they are whole, never trained, and run as plain code.

    The 8-bit values are kept in addition to the weight, which evaluation, merging and export read.
    """
    return train.precision == "fp8" and strategy in ("single", "ddp") and compiled == "off" and not train.unfreeze


def multiply_in_8_bits(layer: nn.Linear, *, emulate: bool) -> None:
    """Make a layer with a frozen weight multiply in 8 bits while it trains; evaluation keeps the weight's dtype."""
    layer.forward = partial(_frozen_forward, layer, _Cast(), emulate)  # type: ignore[method-assign]


class _Cast:
    """The 8-bit values and scales of a weight, computed at its first product and after each change."""

    def __init__(self) -> None:
        self._version: tuple[int, int] | None = None
        self._cast: tuple[Tensor, Tensor] | None = None

    def of(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and scales, [outputs, inputs] and [outputs, 1]."""
        version = (weight.data_ptr(), weight._version)
        if self._cast is None or version != self._version:
            self._cast, self._version = cast_rows(weight.detach()), version
        return self._cast


def _frozen_forward(layer: nn.Linear, cast: _Cast, emulate: bool, inputs: Tensor) -> Tensor:
    if not layer.training:
        return functional.linear(inputs, layer.weight, layer.bias)
    device_type = inputs.device.type
    if torch.is_autocast_enabled(device_type):
        inputs = inputs.to(torch.get_autocast_dtype(device_type))
    rows = inputs.reshape(-1, inputs.shape[-1])
    output: Tensor = FrozenProduct.apply(rows, *cast.of(layer.weight), emulate)  # type: ignore[no-untyped-call]
    if layer.bias is not None:
        output = output + layer.bias.to(output.dtype)
    return output if inputs.dim() == 2 else output.view(*inputs.shape[:-1], -1)


class FrozenProduct(torch.autograd.Function):
    """`rows W^T` with W in 8 bits, [rows, outputs] in the dtype of the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, scales: Tensor, emulate: bool) -> Tensor:
        """Return the product with the weight, [outputs, inputs], which `scales`, [outputs, 1], multiply."""
        ctx.save_for_backward(weight, scales)
        ctx.emulate = emulate
        return _product(*cast_rows(rows), weight.t(), scales.t(), dtype=rows.dtype, emulate=emulate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the rows."""
        weight, scales = ctx.saved_tensors
        operand = weight if ctx.emulate else weight.t().contiguous().t()  # by columns, as the kernel reads it
        ones = scales.new_ones(1, weight.shape[1])
        values = cast_rows(gradient * scales.t())
        return _product(*values, operand, ones, dtype=gradient.dtype, emulate=ctx.emulate), None, None, None


def cast_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows in 8 bits, and the scale of each, [rows, 1], by which its values are to be multiplied."""
    scales = (rows.abs().amax(-1, keepdim=True).float() / _MAX).clamp(min=1e-12)
    return (rows / scales).clamp(-_MAX, _MAX).to(DTYPE), scales


def _product(
    one: Tensor, of_rows: Tensor, other: Tensor, of_columns: Tensor, *, dtype: torch.dtype, emulate: bool
) -> Tensor:
    """Return `(one * of_rows) @ (other * of_columns)`, summed in float32."""
    if emulate:
        return ((one.float() * of_rows) @ (other.float() * of_columns)).to(dtype)
    product: Tensor = torch._scaled_mm(
        one, other, scale_a=of_rows, scale_b=of_columns, out_dtype=dtype, use_fast_accum=True
    )
    return product
