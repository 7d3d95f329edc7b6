"""Batch: one microbatch, what a forward pass and its loss need."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

IGNORED = -100
"""The label of a position that does not count in the loss."""


@dataclass(frozen=True)
class Targets:
    """Where a batch's labels are not IGNORED, found in collation: no host-device synchronisation is needed."""

    positions: Tensor  # [targets], int64: places in the flattened labels, ascending
    labels: Tensor  # [targets], int64
    per_row: tuple[int, ...]  # how many of them each row of the labels has, or each sample of a row without padding

    @classmethod
    def of(cls, labels: np.ndarray) -> "Targets":
        """Return the targets of labels on the host, [batch, length]."""
        is_target = labels != IGNORED
        positions = np.flatnonzero(is_target)
        per_row = tuple(np.count_nonzero(is_target, axis=1).tolist())
        return cls(torch.from_numpy(positions), torch.from_numpy(labels.reshape(-1)[positions]), per_row)

    @property
    def none(self) -> "Targets":
        """Return that there are none, of as many rows."""
        return Targets(self.positions[:0], self.labels[:0], (0,) * len(self.per_row))

    def rows(self, start: int, stop: int, *, begin: int) -> "Targets":
        """Return the targets of these rows, or samples of a row, alone; the first of them begins at place `begin`."""
        first, past = sum(self.per_row[:start]), sum(self.per_row[:stop])
        return Targets(self.positions[first:past] - begin, self.labels[first:past], self.per_row[start:stop])


@dataclass(frozen=True)
class Batch:
    """One microbatch on one rank. Counts are plain integers: no host-device synchronisation."""

    inputs: Mapping[str, Tensor]  # what the model's forward is given; input_ids: [batch, length]
    labels: Tensor  # [batch, length]: the token to be predicted at each position, or IGNORED
    num_targets: int  # positions that count in the loss
    num_tokens: int  # positions that are not padding
    sample_ids: tuple[int, ...]  # of all samples in it; empty for a dummy batch
    cumulative_lengths: Tensor | None = None  # int32, where each sample of a row without padding begins, and the end
    longest: int = 0  # tokens of the longest of those
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # what only the task's loss reads
    seed: int = 0  # of the step that it is used in; 0 where nothing is to be random
    lengths: tuple[int, ...] = ()  # tokens that the model reads of each sample; known in training
    targets: Targets | None = None  # where the labels count; None where a label is no token
    checksums: tuple[int, ...] = ()  # of the contents of those samples (`data/token_cache/integrity.py`)
    partner_ids: tuple[int, ...] = ()  # of samples that others are mixed with
    partner_checksums: tuple[int, ...] = ()
    text_ids: tuple[int, ...] = ()  # digests of the sequences, where equal ones matter
    group_sizes: tuple[int, ...] = ()  # sequences of each sample, where a sample has several
    num_slices: int = 1  # ranks that share its row; tokens, labels and counts are those of one slice
    slice_number: int = 0

    @property
    def positions(self) -> tuple[int, int]:
        """Return how many rows a forward pass has and how many places in each, padding included."""
        laid_out = self.inputs.get("input_ids", self.labels)
        return laid_out.shape[0], laid_out.numel() // max(1, laid_out.shape[0])

    @property
    def counted_ids(self) -> tuple[int, ...]:
        """Return the ids of the samples that this rank counts: none of a slice that is not the row's first."""
        return () if self.slice_number else self.sample_ids

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Return the batch on `device`; Accelerate's dataloader calls this."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory; torch's dataloader calls this."""
        return self._each(Tensor.pin_memory)

    def tensors(self) -> list[Tensor]:
        """Return every tensor in it."""
        found: list[Tensor] = []
        self._each(lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return found

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return replace(
            self,
            inputs={name: change(tensor) for name, tensor in self.inputs.items()},
            labels=change(self.labels),
            extras={name: change(tensor) for name, tensor in self.extras.items()},
            cumulative_lengths=None if self.cumulative_lengths is None else change(self.cumulative_lengths),
            targets=None if self.targets is None else _changed(self.targets, change),
        )


def _changed(targets: Targets, change: Callable[[Tensor], Tensor]) -> Targets:
    return replace(targets, positions=change(targets.positions), labels=change(targets.labels))
