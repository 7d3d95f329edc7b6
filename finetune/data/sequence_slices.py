"""Splits a row into slices of equal length for the ranks that share it (`runtime/sequence_parallel.py`)."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from finetune.data.batch import IGNORED, Batch, Targets
from finetune.errors import StrategyError
from finetune.runtime.sequence_parallel import SequenceGroup


def slice_batch(batch: Batch, group: SequenceGroup) -> Batch:
    """Return this rank's slice of the row: its tokens, labels, targets and counts, and the starts of all samples.

    A row that cannot be split evenly is extended by a sample with fewer tokens than ranks, which is isolated by the
    attention and not counted. Raises StrategyError for a batch with padding.
    """
    if group.size == 1:
        return batch
    if batch.cumulative_lengths is None or batch.targets is None:
        raise StrategyError(
            "sequence parallelism requires rows without padding, but this batch is padded. Write "
            "`data.batching.by: packs`, or `padding_free: true`."
        )
    num_tokens = batch.labels.numel()
    width = -(-num_tokens // group.size)
    num_added, start = width * group.size - num_tokens, width * group.index
    positions = batch.targets.positions
    first, past = torch.searchsorted(positions, torch.tensor([start, start + width])).tolist()
    edges = batch.cumulative_lengths
    return replace(
        batch,
        inputs={name: _sliced(row, start, width, added=range(num_added)) for name, row in batch.inputs.items()},
        labels=_sliced(batch.labels, start, width, added=[IGNORED] * num_added),
        num_targets=past - first,
        num_tokens=max(0, min(width, num_tokens - start)) if batch.num_tokens else 0,
        cumulative_lengths=torch.cat([edges, edges[-1:] + num_added]) if num_added else edges,
        longest=max(batch.longest, num_added),
        lengths=(*batch.lengths, num_added) if num_added else batch.lengths,
        targets=Targets(positions[first:past] - start, batch.targets.labels[first:past], (past - first,)),
        num_slices=group.size,
        slice_number=group.index,
    )


def _sliced(row: Tensor, start: int, width: int, *, added: Iterable[int]) -> Tensor:
    """Return a slice of the row extended by the added ids or positions, [1, width]."""
    extended = torch.cat([row, torch.tensor([list(added)], dtype=row.dtype)], dim=1)
    return extended[:, start : start + width].clone()
