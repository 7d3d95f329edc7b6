"""Convolutions and recurrent scans over a packed row: each sample as if it were alone.

Layers of linear attention, state-space layers and short convolutions carry a state along the row. Their projections
work token by token and see the whole row; only the two functions here must know where samples begin. Without a kernel
that is told so, a convolution reads zeros before each sample, and a scan runs over groups of samples of similar length,
padded on the right, which no earlier position depends on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from finetune.runtime.packed_rows import SampleLengths

Scan = Callable[..., Any]
"""A scan of transformers; returns a tensor, or a tuple whose first value is one and the others None."""

MAX_PADDING, ALWAYS_GROUPED = 0.25, 16
"""Samples of a group are at most this fraction, or this many tokens, shorter than its longest."""


@dataclass(frozen=True)
class ScanInputs:
    """Which arguments of a scan are sequences: their places or names, and their dimension of time."""

    sequences: frozenset[int | str]
    dimension: int
    chunk_size: str | None = None  # the argument that bounds a block of the computation; it alters no number
    default_chunk_size: int = 64


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its sizes would be recompiled for every row
def convolve_samples(convolve: Scan, lengths: SampleLengths, row: Tensor, weight: Tensor, *args: Any, **kw: Any) -> Any:
    """Return the causal convolution of every sample of a row, [1, channels, tokens].

    One call for the row, in which zeros stand between samples: as many as the kernel reaches back.
    """
    sizes, between = lengths.values, weight.shape[-1] - 1
    if len(sizes) == 1 or between == 0:
        return convolve(row, weight, *args, **kw)
    parts = torch.split(row, sizes, dim=2)
    apart = torch.cat([parts[0], *(pad(each, (between, 0)) for each in parts[1:])], dim=2)
    output: Tensor = convolve(apart, weight, *args, **kw)
    found = torch.split(output, [sizes[0], *(each + between for each in sizes[1:])], dim=2)
    return torch.cat([found[0], *(each[:, :, between:] for each in found[1:])], dim=2)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its loop would be recompiled for every row
def scan_samples(
    scan: Scan, lengths: SampleLengths, inputs: ScanInputs, args: Sequence[Any], named: Mapping[str, Any]
) -> Any:
    """Return the scan of every sample of a row; samples of similar length are a batch."""
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(named)
    along = {key: each for key, each in given.items() if key in inputs.sequences and isinstance(each, Tensor)}
    parts = {key: torch.split(each, lengths.values, dim=inputs.dimension) for key, each in along.items()}
    outputs: list[Tensor | None] = [None] * len(lengths.values)
    result: Any = None
    for group in group_by_length(lengths.values):
        of_group = {**given, **{key: _batch(each, group, inputs.dimension) for key, each in parts.items()}}
        _bound_chunk(of_group, inputs, longest=lengths.values[group[0]])
        positional = [of_group.pop(place) for place in range(len(args))]
        result = scan(*positional, **{str(name): each for name, each in of_group.items()})
        batch: Tensor = result[0] if isinstance(result, tuple) else result
        for one, place in zip(batch.unbind(0), group, strict=True):
            outputs[place] = one.narrow(inputs.dimension - 1, 0, lengths.values[place])
    row = torch.cat([each for each in outputs if each is not None], dim=inputs.dimension - 1)[None]
    return (row, *result[1:]) if isinstance(result, tuple) else row


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Return the places of samples in groups of similar length, each with its longest first."""
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and longest - lengths[place] <= max(ALWAYS_GROUPED, int(longest * MAX_PADDING)):
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def _batch(parts: Sequence[Tensor], group: Sequence[int], dimension: int) -> Tensor:
    """Return the group's samples as a batch, padded with zeros on the right."""
    if len(group) == 1:
        return parts[group[0]]
    samples = [parts[place][0].movedim(dimension - 1, 0) for place in group]
    return pad_sequence(samples, batch_first=True).movedim(1, dimension)


def _bound_chunk(given: dict[int | str, Any], inputs: ScanInputs, *, longest: int) -> None:
    """Have blocks be no longer than the group: transformers pads every sequence to whole blocks."""
    if inputs.chunk_size is not None:
        given[inputs.chunk_size] = min(given.get(inputs.chunk_size, inputs.default_chunk_size), longest)
