"""Fused kernels of liger-kernel for RMSNorm, gated MLPs and rotary embeddings (Hsu et al., 2024, arXiv:2410.10989).

A layer gets a kernel only where a probe with random values shows that both compute the same, so the
architecture need not be known. No module or parameter is replaced or renamed: a module gets another `forward`, which
runs the kernel on a GPU and the model's own operations anywhere else. torch's LayerNorm is one kernel already.

A gated MLP keeps its two projections, but not their product: the backward pass computes it again.
"""

import copy
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn import functional

from finetune.config.sections.model import ModelSection
from finetune.model.kernels.compilation import missing_triton_toolchain
from finetune.runtime.optional import lazily, require

with lazily():
    from liger_kernel import ops

Forward = Callable[..., Any]

RMS_NORM, SWIGLU, GEGLU, ROTARY = "RMSNorm", "SwiGLU", "GeGLU", "rotary embedding"

_ROTARY_FUNCTION = "apply_rotary_pos_emb"
"""The function that the attention layers of a modeling file of transformers call."""

_GATED = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
"""The linear layers of a gated MLP."""

_OF_BOTH_HALVES = {"LigerSiLUMulFunction": "LigerFusedGateUpSiLUMulFunction"}
"""Functions (liger-kernel 0.8.5) that read both projections from one tensor instead of copies of its halves."""

_originals: dict[ModuleType, Forward] = {}
"""The rotary functions that were replaced, by their module."""


def fuse_layers(model: nn.Module, *, fuses_rotary: bool = True, stand_ins: Any = None) -> Counter[str]:
    """Use liger's kernels in every layer that computes the same; return the number of layers by kernel.

    `fuses_rotary`: not where checkpointing keeps the output of a projection, which the rotary kernel overwrites.
    `stand_ins` have functions of the same names, which run on any device. Raises MissingPackage without both.
    """
    if stand_ins is None:
        require("liger_kernel.ops", extra="kernels", purpose="`model.kernels: liger`")
    counts: Counter[str] = Counter()
    with torch.random.fork_rng(devices=()), torch.device("cpu"), torch.no_grad():
        for module in model.modules():
            if (fused := _fused_norm(module) or _fused_mlp(module)) is not None:
                counts[fused[0]] += 1
                # A partial, which deepcopy copies.
                module.forward = partial(_forward, module.forward, partial(fused[1], module), stand_ins)
        if fuses_rotary:
            files = {sys.modules[type(module).__module__] for module in model.modules()}
            counts[ROTARY] += sum(map(_fuse_rotary, files))
    return +counts


@contextmanager
def restored_rotary_functions() -> Iterator[None]:
    """Restore the functions of transformers that a run in this context replaces."""
    try:
        yield
    finally:
        for module, function in _originals.items():
            setattr(module, _ROTARY_FUNCTION, function)
        _originals.clear()


def runs_kernels(device_type: str) -> bool:
    """Return whether Triton's kernels run on the device: on CUDA, or anywhere under Triton's interpreter."""
    return device_type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def are_wanted(section: ModelSection, *, compiled: str) -> bool:
    """Return whether the job asks for the kernels: by name, or by `auto` if they are installed.

    `auto` leaves layers alone that are `compiled` (`off`: none are).
    """
    is_usual = section.kernels == "auto" and compiled == "off" and find_spec("liger_kernel") is not None
    return section.kernels == "liger" or is_usual


def missing_kernel_requirement(device_type: str) -> str | None:
    """Return the requirement of the kernels that this device lacks; None if they run."""
    if not runs_kernels(device_type):
        return f"a CUDA GPU, and this run is on `{device_type}`"
    missing = missing_triton_toolchain() if device_type == "cuda" else None
    return None if missing is None else f"triton: {missing}"


def _forward(own: Forward, fused: Forward, stand_ins: Any, rows: Tensor, *others: Any, **named: Any) -> Any:
    """Run the kernel on tensors that it supports, else the module's own forward."""
    runs = stand_ins is not None or runs_kernels(rows.device.type)
    if others or named or not runs or not rows.numel():
        return own(rows, *others, **named)
    result = fused(rows, stand_ins or ops)
    return own(rows) if result is None else result


def _fused_norm(module: nn.Module) -> tuple[str, Forward] | None:
    """Return the kernel for a module that divides the last dimension by its root mean square; else None."""
    names = [name for name, _ in itertools.chain(module.named_parameters(), module.named_buffers())]
    known = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    eps = next((value for value in known if isinstance(value, float)), None)
    if names != ["weight"] or eps is None or isinstance(module, nn.LayerNorm):
        return None
    weight: Any = module.weight
    shape = tuple(getattr(weight, "ds_shape", weight.shape))  # ZeRO-3 has emptied it
    if len(shape) != 1:
        return None
    probes = [
        (torch.randn(4, *shape, dtype=dtype), torch.randn(shape, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    outputs = [
        _tried(torch.func.functional_call, module, {"weight": weights.clone()}, (rows.clone(),))
        for rows, weights in probes
    ]
    for casting, offset in itertools.product(("llama", "gemma"), (0.0, 1.0)):
        expected = [_rms_norm(*probe, eps, casting, offset) for probe in probes]
        if all(map(_are_same, outputs, expected)):
            return RMS_NORM, partial(_run_norm, eps=eps, casting=casting, offset=offset)
    return None


def _run_norm(module: Any, rows: Tensor, functions: Any, *, eps: float, casting: str, offset: float) -> Any:
    if rows.dtype != module.weight.dtype:  # the kernel returns the type of the rows, and a product the wider one
        return None
    # not in place: the residual addition of the rows shares its gradient
    return functions.LigerRMSNormFunction.apply(rows, module.weight, eps, offset, casting, False)


def _rms_norm(rows: Tensor, weight: Tensor, eps: float, casting: str, offset: float) -> Tensor:
    """Compute like the kernel: `llama` multiplies by the weight in the type of the rows, `gemma` in float32."""
    normalized = rows.float() * torch.rsqrt(rows.float().square().mean(-1, keepdim=True) + eps)
    if casting == "llama":
        return (weight + offset) * normalized.to(rows.dtype)
    return (normalized * (offset + weight.float())).to(rows.dtype)


def _fused_mlp(module: nn.Module) -> tuple[str, Forward] | None:
    """Return the kernel for a module that multiplies an activated projection by another one; else None."""
    linear = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    if linear not in _GATED or any(True for _ in module.parameters(recurse=False)):
        return None
    small: Any = copy.copy(module)  # the same forward, with small layers of its own
    sizes = {"gate_proj": (8, 16), "up_proj": (8, 16), "gate_up_proj": (8, 32), "down_proj": (16, 8)}
    small._modules = {**module._modules, **{name: nn.Linear(*sizes[name]) for name in linear}}
    rows = torch.randn(4, 8)
    gate, up = _gate_and_up(small, rows)
    output = _tried(small, rows)
    for name, activate, kernel in (
        (SWIGLU, functional.silu, "LigerSiLUMulFunction"),
        (GEGLU, partial(functional.gelu, approximate="tanh"), "LigerGELUMulFunction"),
    ):
        if _are_same(output, small.down_proj(activate(gate) * up)):
            return name, partial(_run_mlp, kernel=kernel)
    return None


def _run_mlp(module: Any, rows: Tensor, functions: Any, *, kernel: str) -> Any:
    of_both: Any = getattr(functions, _OF_BOTH_HALVES.get(kernel, ""), None)
    is_whole = hasattr(module, "gate_up_proj") and of_both is not None
    projections = [module.gate_up_proj(rows)] if is_whole else _gate_and_up(module, rows)
    flat = [each.reshape(-1, each.shape[-1]) for each in projections]  # in which one function returns the gradient
    in_place = [True] if is_whole else []  # the gradient overwrites the projection, as it does with two
    multiply = (of_both if is_whole else getattr(functions, kernel)).apply
    product = multiply(*flat, *in_place).view(*rows.shape[:-1], -1)
    with _recomputed(product, partial(multiply, *(each.detach() for each in flat), *in_place)):
        return module.down_proj(product)


@contextmanager
def _recomputed(result: Tensor, compute: Callable[[], Tensor]) -> Iterator[None]:
    """Have the backward pass of this context compute the result again instead of keeping it.

    Not where tensors are handled anyway: checkpointing keeps none of them, and offloading moves them.
    """
    has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or has_hooks or isinstance(result, DTensor):
        yield
        return
    storage = result.untyped_storage()._cdata  # the number alone, since torch keeps both functions

    def pack(tensor: Tensor) -> Any:
        if isinstance(tensor, DTensor) or tensor.untyped_storage()._cdata != storage:
            return tensor
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        with torch.no_grad():
            return compute().as_strided(*saved)

    with saved_tensors_hooks(pack, unpack):
        yield


def _gate_and_up(module: Any, rows: Tensor) -> Sequence[Tensor]:
    if hasattr(module, "gate_up_proj"):
        return tuple(module.gate_up_proj(rows).chunk(2, -1))
    return module.gate_proj(rows), module.up_proj(rows)


def _fuse_rotary(module: ModuleType) -> bool:
    """Replace the rotary function of a modeling file if it is the usual one; return whether that was done."""
    own = getattr(module, _ROTARY_FUNCTION, None)
    if own is None or module in _originals or not module.__name__.startswith("transformers.models."):
        return module in _originals
    query, key, angles = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 3, 4).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    expected = []
    for states in (query, key):
        first, second = states.chunk(2, -1)
        expected.append(states * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None])
    outputs = _tried(own, query.clone(), key.clone(), cos, sin)
    if not isinstance(outputs, tuple) or len(outputs) != 2 or not all(map(_are_same, outputs, expected)):
        return False

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> Any:
        is_usual = q.ndim == k.ndim == 4 and cos.ndim == 3 and cos.shape[-1] == q.shape[-1]
        if others or named or not is_usual or not runs_kernels(q.device.type) or not q.numel():
            return own(q, k, cos, sin, *others, **named)
        return ops.LigerRopeFunction.apply(q, k, cos, sin)

    _originals[module] = own
    setattr(module, _ROTARY_FUNCTION, rotate)
    return True


def _tried(function: Callable[..., Any], *values: Any) -> Any:
    """Return the result; None if the function does not accept these values."""
    try:
        return function(*values)
    except Exception:
        return None


def _are_same(output: Any, expected: Tensor) -> bool:
    """Return whether the tensors have the same type and shape, and equal values but for the last bits in float32."""
    if not isinstance(output, Tensor) or (output.dtype, output.shape) != (expected.dtype, expected.shape):
        return False
    tolerance = 1e-6 if expected.dtype == torch.float32 else 0.0
    return torch.allclose(output, expected, rtol=tolerance, atol=tolerance)
