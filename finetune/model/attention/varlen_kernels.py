"""Variable-length attention kernels for a whole packed row: flash attention's, else torch's own."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from finetune.model.attention.causal import AttentionSettings, QueryKeyValue
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
    torchs: Callable[..., Tensor] | None = None  # torch's own
    groups_heads: bool = False  # whether that one groups heads by itself (torch 2.12)


_available = AvailableKernels()


def varlen_kernel(heads: QueryKeyValue, scores: AttentionSettings) -> Kernel | None:
    """Return the kernel for such a row on its device; None where each sample is computed separately."""
    width = heads.query.shape[-1]
    if not _available.is_capable or not heads.query.is_cuda or _attention_dtype(heads) not in HALF_DTYPES:
        return None
    if width != heads.value.shape[-1] or width > MAX_HEAD_DIM:
        return None
    if _available.flash is not None:
        return _flash_varlen
    is_plain = scores.dropout == 0 and scores.softcap is None and width % 8 == 0
    return _torch_varlen if is_plain and _available.torchs is not None else None


def missing_kernel_warning(*, is_half: bool) -> str | None:
    """Return a warning if a GPU computes rows sample by sample because a kernel is missing; else None."""
    if not torch.cuda.is_available() or not is_half:
        return None  # no such kernel supports float32
    detect_kernels()
    if not _available.is_capable:
        return (
            "attention: packed rows are computed sample by sample, which is slow: this GPU supports no varlen kernel."
        )
    if _available.flash is None and _available.torchs is None:
        return (
            "attention: packed rows are computed sample by sample, which is slow: flash attention is not "
            "installed, and "
            "this torch has no varlen kernel. Install `flash-attn`, or torch 2.11 or newer."
        )
    return None


def _flash_varlen(heads: QueryKeyValue, edges: Tensor, longest: int, scores: AttentionSettings) -> Tensor:
    assert _available.flash is not None  # asked for by varlen_kernel
    output: Tensor = _available.flash.flash_attn_varlen_func(
        *_as_varlen_inputs(heads),
        edges,
        edges,
        longest,
        longest,
        dropout_p=scores.dropout,
        softmax_scale=scores.scaling,
        causal=True,
        window_size=_window_size(scores),
        softcap=scores.softcap or 0.0,
    )
    return output[None]


def _torch_varlen(heads: QueryKeyValue, edges: Tensor, longest: int, scores: AttentionSettings) -> Tensor:
    assert _available.torchs is not None  # asked for by varlen_kernel
    groups = {"enable_gqa": heads.query.shape[1] != heads.key.shape[1]} if _available.groups_heads else {}
    output: Tensor = _available.torchs(
        *_as_varlen_inputs(heads if groups else heads.repeated),
        edges,
        edges,
        longest,
        longest,
        scale=scores.scaling,
        window_size=(_window_size(scores)[0], 0),
        **groups,
    )
    return output[None]


def _window_size(scores: AttentionSettings) -> tuple[int, int]:
    """Return how many keys to the left and right a query attends to; -1 is all."""
    return (-1, -1) if scores.window is None else (scores.window - 1, 0)


def _as_varlen_inputs(heads: QueryKeyValue) -> tuple[Tensor, ...]:
    """Return queries, keys and values as [tokens, heads, width] in the kernel's dtype."""
    dtype = _attention_dtype(heads)
    return tuple(each[0].transpose(0, 1).to(dtype) for each in heads)


def _attention_dtype(heads: QueryKeyValue) -> torch.dtype:
    """Return the dtype of the attention: norms may leave queries and keys in a wider dtype than the values."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else heads.value.dtype


def detect_kernels() -> None:
    """Detect the kernels once: compiled code can neither look for packages nor read signatures."""
    global _available
    if not torch.cuda.is_available():
        return
    kernel = getattr(_import_if_installed("torch.nn.attention.varlen"), "varlen_attn", None)
    known = frozenset(inspect.signature(kernel).parameters) if kernel else frozenset()
    _available = AvailableKernels(
        torch.cuda.get_device_capability() >= MIN_CAPABILITY,
        _import_if_installed("flash_attn"),
        kernel if {"scale", "window_size"} <= known else None,  # torch 2.10 has neither
        groups_heads="enable_gqa" in known,
    )


def _import_if_installed(module: str) -> ModuleType | None:
    """Return the module; None if it is not installed, or was built for another torch."""
    try:
        return require(module, extra="flash", purpose="attention") if find_spec(module) else None
    except ImportError:
        return None
