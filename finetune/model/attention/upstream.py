"""Every workaround for transformers in packed rows: its convolutions and scans get the boundaries of samples.

transformers 5.23 passes a layer's keyword arguments to these functions of its modeling files, where a kernel package
may accept `cu_seqlens` or `seq_idx`; its own code in torch accepts neither and raises ValueError ("can't keep packed
sequences apart"), and nothing computes `seq_idx`. Without sample lengths, transformers' own functions run unchanged.
Each can be removed when transformers' torch code accepts the boundaries.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial, wraps
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from finetune.errors import MissingPackage
from finetune.runtime.optional import require
from finetune.runtime.parallel import SAMPLE_LENGTHS, SampleLengths

CHECKED = {"transformers": (5, 24)}

Scan = Callable[..., Any]
"""A scan of transformers; returns a tensor, or a tuple whose first value is one and the others None."""

MAX_PADDING, ALWAYS_GROUPED = 0.25, 16
"""Samples of a group are at most this fraction, or this many tokens, shorter than its longest."""


@dataclass(frozen=True)
class ScanInputs:
    """Which arguments of a scan are sequences, by position or name, and their dimension of time."""

    sequences: frozenset[int | str]
    dimension: int
    chunk_size: str | None = None  # the argument that bounds a block of the computation; it alters no number
    default_chunk_size: int = 64


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its sizes would be recompiled for every row
def convolve_samples(convolve: Scan, lengths: SampleLengths, row: Tensor, weight: Tensor, *args: Any, **kw: Any) -> Any:
    """Return the causal convolution of every sample of a row, [1, channels, tokens].

    One call for the row, with zeros between samples: one fewer than the width of the convolution.
    """
    sizes, between = lengths.values, weight.shape[-1] - 1
    if len(sizes) == 1 or between == 0:
        return convolve(row, weight, *args, **kw)
    samples = torch.split(row, sizes, dim=2)
    separated = torch.cat([samples[0], *(pad(sample, (between, 0)) for sample in samples[1:])], dim=2)
    output: Tensor = convolve(separated, weight, *args, **kw)
    outputs = torch.split(output, [sizes[0], *(size + between for size in sizes[1:])], dim=2)
    return torch.cat([outputs[0], *(sample[:, :, between:] for sample in outputs[1:])], dim=2)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its loop would be recompiled for every row
def scan_samples(inputs: ScanInputs, scan: Scan, lengths: SampleLengths, *args: Any, **named: Any) -> Any:
    """Return the scan of every sample of a row; samples of similar length are a batch."""
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(named)
    parts = {
        key: torch.split(value, lengths.values, dim=inputs.dimension)
        for key, value in given.items()
        if key in inputs.sequences and isinstance(value, Tensor)
    }
    outputs: list[Tensor | None] = [None] * len(lengths.values)
    result: Any = None
    for group in group_by_length(lengths.values):
        of_group = dict(given)
        for key, samples in parts.items():
            if len(group) == 1:
                of_group[key] = samples[group[0]]
            else:  # padded with zeros on the right
                by_time = [samples[index][0].movedim(inputs.dimension - 1, 0) for index in group]
                of_group[key] = pad_sequence(by_time, batch_first=True).movedim(1, inputs.dimension)
        if inputs.chunk_size is not None:  # transformers pads every sequence to whole blocks
            chunk_size = of_group.get(inputs.chunk_size, inputs.default_chunk_size)
            of_group[inputs.chunk_size] = min(chunk_size, lengths.values[group[0]])
        positional = [of_group.pop(position) for position in range(len(args))]
        result = scan(*positional, **{str(name): value for name, value in of_group.items()})
        batch: Tensor = result[0] if isinstance(result, tuple) else result
        for output, index in zip(batch.unbind(0), group, strict=True):
            outputs[index] = output.narrow(inputs.dimension - 1, 0, lengths.values[index])
    row = torch.cat([output for output in outputs if output is not None], dim=inputs.dimension - 1)[None]
    return (row, *result[1:]) if isinstance(result, tuple) else row


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Return the indices of samples in groups of similar length, the longest of each group first."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and longest - lengths[index] <= max(ALWAYS_GROUPED, int(longest * MAX_PADDING)):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


@dataclass(frozen=True)
class RowFunction:
    """A function of transformers' modeling files that mixes the positions of a row."""

    by_sample: Callable[..., Any]  # (function, lengths, its arguments) -> its results, sample by sample
    kernel: tuple[str, str]  # module and name of the kernel that transformers calls if it is installed
    boundaries: str  # the kernel's argument for the boundaries of samples


_DELTA_RULE = ScanInputs(frozenset({0, 1, 2, "g", "beta"}), dimension=1, chunk_size="chunk_size")
_MAMBA_2 = ScanInputs(frozenset({0, 1, 3, 4, "z"}), dimension=1, chunk_size="chunk_size", default_chunk_size=256)
_SSD = "mamba_ssm.ops.triton.ssd_combined"
ROW_FUNCTIONS: Mapping[str, RowFunction] = {
    "causal_conv1d_fn": RowFunction(convolve_samples, ("causal_conv1d", "causal_conv1d_fn"), "seq_idx"),
    "torch_chunk_gated_delta_rule": RowFunction(
        partial(scan_samples, _DELTA_RULE), ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"), "cu_seqlens"
    ),
    "chunk_kimi_delta_attention": RowFunction(
        partial(scan_samples, _DELTA_RULE), ("fla.ops.kda", "chunk_kda"), "cu_seqlens"
    ),
    "mamba2_chunk_scan": RowFunction(partial(scan_samples, _MAMBA_2), (_SSD, "mamba_chunk_scan_combined"), "seq_idx"),
    # as transformers' torch code: convolution and scan are then called one by one
    "mamba2_split_conv1d_scan_combined": RowFunction(
        lambda *_, **__: None, (_SSD, "mamba_split_conv1d_scan_combined"), "seq_idx"
    ),
}
"""All of them by name; `*_update` functions are for decoding with a cache."""

DROPPED_ARGUMENTS: Mapping[str, tuple[str, str]] = {"mamba2": ("Mamba2ForCausalLM", "Mamba2Model")}
"""Models whose head, the first class, calls the body, the second, without its keyword arguments (transformers 5.23)."""

ROW_ARGUMENTS = (SAMPLE_LENGTHS, "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


_row: ContextVar[Mapping[str, Any]] = ContextVar("row", default=MappingProxyType({}))
"""While a head runs, its arguments about the row, which the body gets, too."""


def modeling_file(config: Any) -> ModuleType | None:
    """Return the modeling file next to the config's class; None if there is none."""
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
    if head is None or body is None or hasattr(head.forward, "separates_samples"):
        return
    of_head, of_body = head.forward, body.forward

    @wraps(of_head)
    def remember(self: Any, *args: Any, **named: Any) -> Any:
        before = _row.set({name: named[name] for name in ROW_ARGUMENTS if name in named})
        try:
            return of_head(self, *args, **named)
        finally:
            _row.reset(before)

    remember.separates_samples = True  # type: ignore[attr-defined]
    head.forward = remember
    body.forward = wraps(of_body)(lambda self, *args, **named: of_body(self, *args, **{**_row.get(), **named}))


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
        others = {name: value for name, value in named.items() if name not in ("cu_seqlens", "seq_idx")}
        if calls_kernel and args[0].is_cuda and _takes(*function.kernel, function.boundaries):
            edges: Any = named.get("cu_seqlens", named.get("cu_seq_lens_q"))
            others[function.boundaries] = edges if function.boundaries == "cu_seqlens" else sample_index(edges, lengths)
            return original(*args, **others)
        return function.by_sample(original, lengths, *args, **others)

    separate.separates_samples = True  # type: ignore[attr-defined]
    return separate


@cache
def _takes(module: str, name: str, argument: str) -> bool:
    """Return whether that kernel is installed and has the argument: transformers drops unknown ones."""
    kernel = getattr(_module(module), name, None)
    return kernel is not None and argument in inspect.signature(kernel).parameters


def sample_index(edges: Tensor, lengths: SampleLengths) -> Tensor:
    """Return the number of each token's sample, [1, tokens], from cumulative lengths on the device."""
    numbers = torch.arange(len(lengths.values), dtype=torch.int32, device=edges.device)
    return torch.repeat_interleave(numbers, edges.diff(), output_size=sum(lengths.values))[None]


def retune_queries(module: Any, query: Tensor, edges: Any, lengths: SampleLengths) -> Tensor:
    """Return queries with the temperature of their positions in their own samples.

    Llama 4 tunes the temperature of layers without rotary positions by the position in the row and ignores
    `position_ids` (transformers 5.23, Llama4TextAttention.forward). Can go when it reads the positions.
    """
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query
    positions = torch.arange(query.shape[2], device=query.device)
    own_positions = positions - edges[sample_index(edges, lengths)[0].long()]
    of_row, of_sample = (
        torch.log1p(torch.floor((position.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        for position in (positions, own_positions)
    )
    retuned: Tensor = query * (of_sample / of_row)[:, None]
    return retuned.to(query.dtype)
