"""A row's slices of equal length, one for each of the ranks that share it (`runtime/sequence_parallel.py`)."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from finetune.data.batch import IGNORED, Batch, Targets
from finetune.errors import StrategyError
from finetune.runtime.sequence_parallel import SequenceGroup


def slice_batch(batch: Batch, group: SequenceGroup) -> Batch:
    """Return this rank's slice of the row: its tokens, labels, targets and their counts, and where all samples begin.

    A row that cannot be cut evenly is extended by a sample of fewer tokens than ranks, which no other attends to and no
    count contains. Raises StrategyError for a batch with padding.
    """
    if group.size == 1:
        return batch
    if batch.cumulative_lengths is None or batch.targets is None:
        raise StrategyError(
            "sequence parallelism cuts rows without padding, and this batch is padded. Write "
            "`data.batching.by: packs`, or `padding_free: true`."
        )
    num_tokens = batch.labels.numel()
    width = -(-num_tokens // group.size)
    more, start = width * group.size - num_tokens, width * group.place
    targets = _targets_within(batch.targets, start, start + width)
    return replace(
        batch,
        inputs={name: _sliced(row, start, width, filled=range(more)) for name, row in batch.inputs.items()},
        labels=_sliced(batch.labels, start, width, filled=[IGNORED] * more),
        num_targets=len(targets.labels),
        num_tokens=max(0, min(width, num_tokens - start)) if batch.num_tokens else 0,
        cumulative_lengths=_with_end(batch.cumulative_lengths, more),
        longest=max(batch.longest, more),
        lengths=(*batch.lengths, more) if more else batch.lengths,
        targets=targets,
        num_slices=group.size,
        slice_number=group.place,
    )


def _sliced(row: Tensor, start: int, width: int, *, filled: Iterable[int]) -> Tensor:
    """Return these tokens of a row, [1, width]; what is `filled` in after its end are ids or positions from 0."""
    whole = torch.cat([row, torch.tensor([list(filled)], dtype=row.dtype)], dim=1)
    return whole[:, start : start + width].clone()


def _targets_within(targets: Targets, start: int, stop: int) -> Targets:
    first, past = torch.searchsorted(targets.positions, torch.tensor([start, stop])).tolist()
    return Targets(targets.positions[first:past] - start, targets.labels[first:past], (past - first,))


def _with_end(edges: Tensor, more: int) -> Tensor:
    return torch.cat([edges, edges[-1:] + more]) if more else edges
