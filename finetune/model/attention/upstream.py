"""Every workaround for transformers in packed rows: its convolutions and scans are told where samples begin.

transformers 5.23 hands a layer's keyword arguments on to these functions of its modeling files, where a kernel package
may take `cu_seqlens` or `seq_idx`; its own code in torch takes neither and raises ValueError ("can't keep packed
sequences apart"), and nothing computes `seq_idx`. Without sample lengths among the arguments, what is called is
transformers' function, unchanged. Can go, function by function, when transformers' torch code takes the boundaries.
"""

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial, wraps
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from finetune.errors import MissingPackage
from finetune.model.attention.packed_scans import ScanInputs, convolve_samples, scan_samples
from finetune.runtime.optional import require
from finetune.runtime.packed_rows import SAMPLE_LENGTHS, SampleLengths

CHECKED = {"transformers": (5, 24)}

_DELTA_RULE = ScanInputs(frozenset({0, 1, 2, "g", "beta"}), dimension=1, chunk_size="chunk_size")
_MAMBA_2 = ScanInputs(frozenset({0, 1, 3, 4, "z"}), dimension=1, chunk_size="chunk_size", default_chunk_size=256)


@dataclass(frozen=True)
class RowFunction:
    """A function of transformers' modeling files that mixes the positions of a row."""

    by_sample: Callable[..., Any]  # (function, lengths, its arguments) -> what it returns, sample by sample
    kernel: tuple[str, str]  # module and name of the kernel that transformers calls where it is installed
    boundaries: str  # the kernel's argument that tells it where samples begin


def _convolve(original: Any, lengths: SampleLengths, *args: Any, **named: Any) -> Any:
    return convolve_samples(original, lengths, *args, **named)


def _scan(inputs: ScanInputs, original: Any, lengths: SampleLengths, *args: Any, **named: Any) -> Any:
    return scan_samples(original, lengths, inputs, args, named)


def _leave_unfused(*_: Any, **__: Any) -> None:
    """Return what transformers' torch code does: convolution and scan are then called one by one."""


_SSD = "mamba_ssm.ops.triton.ssd_combined"
ROW_FUNCTIONS: Mapping[str, RowFunction] = {
    "causal_conv1d_fn": RowFunction(_convolve, ("causal_conv1d", "causal_conv1d_fn"), "seq_idx"),
    "torch_chunk_gated_delta_rule": RowFunction(
        partial(_scan, _DELTA_RULE), ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"), "cu_seqlens"
    ),
    "chunk_kimi_delta_attention": RowFunction(partial(_scan, _DELTA_RULE), ("fla.ops.kda", "chunk_kda"), "cu_seqlens"),
    "mamba2_chunk_scan": RowFunction(partial(_scan, _MAMBA_2), (_SSD, "mamba_chunk_scan_combined"), "seq_idx"),
    "mamba2_split_conv1d_scan_combined": RowFunction(
        _leave_unfused, (_SSD, "mamba_split_conv1d_scan_combined"), "seq_idx"
    ),
}
"""All of them by name; `*_update` functions are for decoding with a cache."""

DROPPED_ARGUMENTS: Mapping[str, tuple[str, str]] = {"mamba2": ("Mamba2ForCausalLM", "Mamba2Model")}
"""Models whose head, the first class, calls the body, the second, without its keyword arguments (transformers 5.23)."""

ROW_ARGUMENTS = (SAMPLE_LENGTHS, "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def modeling_file(config: Any) -> ModuleType | None:
    """Return the modeling file beside the config's class; None if there is none."""
    return _module(type(config).__module__.replace(".configuration_", ".modeling_"))


def _module(name: str) -> ModuleType | None:
    try:
        return require(name, extra="flash", purpose="a row of several samples")
    except (ImportError, MissingPackage):
        return None


def patch_row_functions(config: Any) -> None:
    """Have the functions of this model's file that mix positions keep the samples of a packed row apart."""
    file = modeling_file(config)
    if file is None:
        return
    for name, function in ROW_FUNCTIONS.items():
        original = vars(file).get(name)
        if original is not None and not hasattr(original, "separates_samples"):
            setattr(file, name, _separating(original, function))
    head, body = (vars(file).get(name) for name in DROPPED_ARGUMENTS.get(config.model_type, ("", "")))
    if head is not None and body is not None and not hasattr(head.forward, "separates_samples"):
        head.forward = _remembering_row(head.forward)
        body.forward = _given_row(body.forward)


def _separating(original: Callable[..., Any], function: RowFunction) -> Callable[..., Any]:
    """Return the function; where sample lengths are among its arguments, it keeps samples apart.

    Only a function that transformers decorates calls a kernel: LFM3's convolution is torch's up to transformers 5.23.
    """
    calls_kernel = hasattr(original, "__wrapped__")

    @wraps(original)
    def separate(*args: Any, **named: Any) -> Any:
        lengths = named.pop(SAMPLE_LENGTHS, None)
        if lengths is None:
            return original(*args, **named)
        others = {name: each for name, each in named.items() if name not in ("cu_seqlens", "seq_idx")}
        if calls_kernel and args[0].is_cuda and _takes(*function.kernel, function.boundaries):
            edges: Any = named.get("cu_seqlens", named.get("cu_seq_lens_q"))
            told = edges if function.boundaries == "cu_seqlens" else sample_index(edges, lengths)
            return original(*args, **others, **{function.boundaries: told})
        return function.by_sample(original, lengths, *args, **others)

    separate.separates_samples = True  # type: ignore[attr-defined]
    return separate


@cache
def _takes(module: str, name: str, argument: str) -> bool:
    """Tell whether that kernel is installed and has the argument: transformers drops those that it does not have."""
    kernel = getattr(_module(module), name, None)
    return kernel is not None and argument in inspect.signature(kernel).parameters


def sample_index(edges: Tensor, lengths: SampleLengths) -> Tensor:
    """Return the number of each token's sample, [1, tokens], from cumulative lengths on the device."""
    numbers = torch.arange(len(lengths.values), dtype=torch.int32, device=edges.device)
    return torch.repeat_interleave(numbers, edges.diff(), output_size=sum(lengths.values))[None]


def retune_queries(module: Any, query: Tensor, edges: Any, lengths: SampleLengths) -> Tensor:
    """Return queries with the temperature of their places in their own samples.

    Llama 4 tunes the temperature of layers without rotary positions by the place in the row, whatever `position_ids`
    say (transformers 5.23, Llama4TextAttention.forward). Can go when it reads the positions.
    """
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query
    places = torch.arange(query.shape[2], device=query.device)
    own = places - edges[sample_index(edges, lengths)[0].long()]
    of_row, of_sample = (
        torch.log1p(torch.floor((each.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        for each in (places, own)
    )
    retuned: Tensor = query * (of_sample / of_row)[:, None]
    return retuned.to(query.dtype)


_row: ContextVar[Mapping[str, Any]] = ContextVar("row", default=MappingProxyType({}))


def _remembering_row(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a head; while it runs, its arguments about the row are known to the body."""

    @wraps(forward)
    def remember(self: Any, *args: Any, **named: Any) -> Any:
        before = _row.set({name: named[name] for name in ROW_ARGUMENTS if name in named})
        try:
            return forward(self, *args, **named)
        finally:
            _row.reset(before)

    remember.separates_samples = True  # type: ignore[attr-defined]
    return remember


def _given_row(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a body that is given the row's arguments, too."""

    @wraps(forward)
    def give(self: Any, *args: Any, **named: Any) -> Any:
        return forward(self, *args, **{**_row.get(), **named})

    return give
