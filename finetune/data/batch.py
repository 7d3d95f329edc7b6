"""Batch: one microbatch, what a forward pass and its loss need."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

IGNORED = -100
"""The label of a position that does not count in the loss."""


@dataclass(frozen=True)
class Batch:
    """One microbatch on one rank. Counts are plain integers, so that nobody waits for a device to learn them."""

    inputs: Mapping[str, Tensor]  # what the model's forward is given; input_ids: [batch, length]
    labels: Tensor  # [batch, length]: the token to be predicted at each position, or IGNORED
    num_targets: int  # positions that count in the loss
    num_tokens: int  # positions that are not padding
    sample_ids: tuple[int, ...]  # of all samples in it; empty for a filler batch
    cumulative_lengths: Tensor | None = None  # int32, where each sample of a row without padding begins, and the end
    longest: int = 0  # tokens of the longest of those
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # what only the task's loss reads
    seed: int = 0  # of the step that it is learnt in; 0 where nothing is to be random
    lengths: tuple[int, ...] = ()  # tokens that the model reads of each sample; known in training

    @property
    def positions(self) -> tuple[int, int]:
        """Return how many rows a forward pass has and how many places in each, padding included."""
        laid_out = self.inputs.get("input_ids", self.labels)
        return laid_out.shape[0], laid_out.numel() // max(1, laid_out.shape[0])

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Return the batch on `device`; Accelerate's dataloader calls this."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory; torch's dataloader calls this."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return replace(
            self,
            inputs={name: change(tensor) for name, tensor in self.inputs.items()},
            labels=change(self.labels),
            extras={name: change(tensor) for name, tensor in self.extras.items()},
            cumulative_lengths=None if self.cumulative_lengths is None else change(self.cumulative_lengths),
        )
