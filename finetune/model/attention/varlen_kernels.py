"""Variable-length attention kernels for a whole packed row: flash attention's, else torch's own."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from finetune.model.attention.sample_attention import AttentionSettings, QueryKeyValue
from finetune.runtime.optional import require

Kernel = Callable[[QueryKeyValue, Tensor, int, AttentionSettings], Tensor]
"""From queries, keys, values of a row, cumulative sample lengths and the longest one to [1, tokens, heads, width]."""

HALF_DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class AvailableKernels:
    """The kernels that this machine has."""

    is_capable: bool = False  # whether the GPU is new enough
    flash: ModuleType | None = None  # the package
    torch_varlen: Callable[..., Tensor] | None = None  # torch's own
    supports_gqa: bool = False  # whether that one groups heads by itself (torch 2.12)
    device_type: str = "cuda"
    is_flash_repeatable: bool = True  # whether the package can be asked for a deterministic backward pass (2.4.1)


_available = AvailableKernels()


def varlen_kernel(qkv: QueryKeyValue, settings: AttentionSettings) -> Kernel | None:
    """Return the kernel for such a row on its device; None where each sample is computed separately."""
    width = qkv.query.shape[-1]
    is_available = _available.is_capable and qkv.query.device.type == _available.device_type
    if not is_available or _attention_dtype(qkv) not in HALF_DTYPES:
        return None
    if width != qkv.value.shape[-1] or width > MAX_HEAD_DIM or settings.sinks is not None:
        return None
    if _available.flash is not None and (_available.is_flash_repeatable or not _wants_determinism()):
        return _flash_varlen
    is_plain = settings.dropout == 0 and settings.softcap is None and width % 8 == 0
    return _torch_varlen if is_plain and _available.torch_varlen is not None else None


def missing_kernel_warning(*, is_half: bool, has_sinks: bool = False) -> str | None:
    """Return a warning if a GPU computes rows sample by sample because a kernel is missing; else None."""
    if not torch.cuda.is_available() or not is_half:
        return None  # no such kernel supports float32
    detect_kernels()
    if not _available.is_capable:
        return (
            "attention: packed rows are computed sample by sample, which is slow: this GPU supports no varlen kernel."
        )
    if _available.flash is None and _available.torch_varlen is None:
        return (
            "attention: packed rows are computed sample by sample, which is slow: flash attention is not installed, "
            "and this torch has no varlen kernel. Install `flash-attn`, or torch 2.11 or newer."
        )
    if has_sinks:
        return "attention: packed rows are computed sample by sample: no varlen kernel supports attention sinks."
    return None


def _flash_varlen(qkv: QueryKeyValue, edges: Tensor, longest: int, settings: AttentionSettings) -> Tensor:
    assert _available.flash is not None  # checked by varlen_kernel
    output: Tensor = _available.flash.flash_attn_varlen_func(
        *_as_varlen_inputs(qkv),
        edges,
        edges,
        longest,
        longest,
        dropout_p=settings.dropout,
        softmax_scale=settings.scaling,
        causal=settings.is_causal,
        window_size=_window_size(settings),
        softcap=settings.softcap or 0.0,
        **({"deterministic": True} if _wants_determinism() else {}),
    )
    return output[None]


def _wants_determinism() -> bool:
    """Return whether the run is deterministic: torch's kernel does so itself, flash attention's needs an argument."""
    return torch.are_deterministic_algorithms_enabled()


def _torch_varlen(qkv: QueryKeyValue, edges: Tensor, longest: int, settings: AttentionSettings) -> Tensor:
    assert _available.torch_varlen is not None  # checked by varlen_kernel
    groups = {"enable_gqa": qkv.query.shape[1] != qkv.key.shape[1]} if _available.supports_gqa else {}
    output: Tensor = _available.torch_varlen(
        *_as_varlen_inputs(qkv if groups else qkv.repeated),
        edges,
        edges,
        longest,
        longest,
        scale=settings.scaling,
        window_size=_window_size(settings, causal_right=0),
        **groups,
    )
    return output[None]


def _window_size(settings: AttentionSettings, *, causal_right: int = -1) -> tuple[int, int]:
    """Return the number of keys to the left and right that a query attends to; -1 is all.

    `causal_right` is the kernel's argument for the right side of causal attention without a window.
    """
    side = -1 if settings.window is None else settings.window - 1
    if not settings.is_causal:
        return side, side
    return side, causal_right if settings.window is None else 0


def _as_varlen_inputs(qkv: QueryKeyValue) -> tuple[Tensor, ...]:
    """Return queries, keys and values as [tokens, heads, width] in the kernel's dtype."""
    dtype = _attention_dtype(qkv)
    return tuple(tensor[0].transpose(0, 1).to(dtype) for tensor in qkv)


def _attention_dtype(qkv: QueryKeyValue) -> torch.dtype:
    """Return the dtype of the attention: norms may leave queries and keys in a wider dtype than the values."""
    device = qkv.query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else qkv.value.dtype


def detect_kernels() -> None:
    """Detect the kernels once: compiled code can neither look for packages nor read signatures."""
    global _available
    if not torch.cuda.is_available():
        return
    kernel = getattr(_import_if_installed("torch.nn.attention.varlen"), "varlen_attn", None)
    known = _parameters(kernel)
    flash = _import_if_installed("flash_attn")
    _available = AvailableKernels(
        torch.cuda.get_device_capability() >= MIN_CAPABILITY,
        flash,
        kernel if {"scale", "window_size"} <= known else None,  # torch 2.10 has neither
        supports_gqa="enable_gqa" in known,
        is_flash_repeatable="deterministic" in _parameters(getattr(flash, "flash_attn_varlen_func", None)),
    )


def _parameters(function: Callable[..., Tensor] | None) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters) if function else frozenset()


def _import_if_installed(module: str) -> ModuleType | None:
    """Return the module; None if it is not installed, or was built for another torch."""
    try:
        return require(module, extra="flash", purpose="attention") if find_spec(module) else None
    except ImportError:
        return None
