"""Batch: one microbatch, the inputs of a forward pass and its loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

IGNORED = -100
"""The label of a position that does not count in the loss."""


@dataclass(frozen=True)
class Targets:
    """The positions of a batch's labels that are not IGNORED, computed in collation, without device synchronization."""

    positions: Tensor  # [targets], int64: indices into the flattened labels, ascending
    labels: Tensor  # [targets], int64
    per_row: tuple[int, ...]  # number of targets per row of the labels, or per sample of an unpadded row

    @classmethod
    def of(cls, labels: np.ndarray) -> "Targets":
        """Return the targets of labels on the host, [batch, length]."""
        is_target = labels != IGNORED
        positions = np.flatnonzero(is_target)
        per_row = tuple(np.count_nonzero(is_target, axis=1).tolist())
        return cls(torch.from_numpy(positions), torch.from_numpy(labels.reshape(-1)[positions]), per_row)

    @property
    def none(self) -> "Targets":
        """Return an empty set of targets with the same number of rows."""
        return Targets(self.positions[:0], self.labels[:0], (0,) * len(self.per_row))

    def rows(self, start: int, stop: int, *, begin: int) -> "Targets":
        """Return the targets of these rows, or samples of an unpadded row; the first one starts at position `begin`."""
        first, last = sum(self.per_row[:start]), sum(self.per_row[:stop])
        return Targets(self.positions[first:last] - begin, self.labels[first:last], self.per_row[start:stop])


@dataclass(frozen=True)
class Batch:
    """One microbatch on one rank. Counts are plain integers, which need no host-device synchronization."""

    inputs: Mapping[str, Tensor]  # keyword arguments of the model's forward; input_ids: [batch, length]
    labels: Tensor  # [batch, length]: the token to be predicted at each position, or IGNORED
    num_targets: int  # positions that count in the loss
    num_tokens: int  # positions that are not padding
    sample_ids: tuple[int, ...]  # of all its samples; empty for a dummy batch
    cumulative_lengths: Tensor | None = None  # int32, the start of each sample of an unpadded row, and the end
    longest: int = 0  # tokens of the longest of those
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # tensors that only the task's loss reads
    seed: int = 0  # of the step that uses it; 0 without randomness
    lengths: tuple[int, ...] = ()  # tokens that the model reads of each sample; known in training
    targets: Targets | None = None  # positions of the labels that count; None if labels are not tokens
    checksums: tuple[int, ...] = ()  # of the samples' contents (`data/token_cache/integrity.py`)
    partner_ids: tuple[int, ...] = ()  # of the samples that others are mixed with
    partner_checksums: tuple[int, ...] = ()
    text_ids: tuple[int, ...] = ()  # digests of the sequences, if duplicates matter
    group_sizes: tuple[int, ...] = ()  # number of sequences of each sample, if a sample has several
    num_slices: int = 1  # ranks that share its row; tokens, labels and counts belong to one slice
    slice_number: int = 0
    is_copy: bool = False  # another rank computes the same batch and counts it

    @property
    def positions(self) -> tuple[int, int]:
        """Return the number of rows of a forward pass and the positions in each, padding included."""
        tensor = self.inputs.get("input_ids", self.labels)
        return tensor.shape[0], tensor.numel() // max(1, tensor.shape[0])

    @property
    def counted_ids(self) -> tuple[int, ...]:
        """Return the ids of the samples that this rank counts: all of a row's first slice, and none of a copy."""
        return () if self.slice_number or self.is_copy else self.sample_ids

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Return the batch on `device`; Accelerate's dataloader calls this."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory; torch's dataloader calls this."""
        return self._map_tensors(Tensor.pin_memory)

    def tensors(self) -> list[Tensor]:
        """Return every tensor in it."""
        tensors: list[Tensor] = []
        self._map_tensors(lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return tensors

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return replace(
            self,
            inputs={name: change(tensor) for name, tensor in self.inputs.items()},
            labels=change(self.labels),
            extras={name: change(tensor) for name, tensor in self.extras.items()},
            cumulative_lengths=None if self.cumulative_lengths is None else change(self.cumulative_lengths),
            targets=None
            if self.targets is None
            else replace(self.targets, positions=change(self.targets.positions), labels=change(self.targets.labels)),
        )
