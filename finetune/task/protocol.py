"""The seam of what is learnt: rows become features, features batches, batches a summed loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from finetune.data.batch import Batch
from finetune.data.features import Features, Outcome
from finetune.data.prepared.chunks import Encode

ModelHead = Literal["causal_lm"]
"""Which head the model gets; the model wing maps it to an Auto class of transformers."""

Row = Mapping[str, Any]
"""A row of the data as its format delivers it."""


@dataclass(frozen=True)
class Prompt:
    """What the model is asked in a generation, and what it should answer."""

    input_ids: tuple[int, ...]
    reference_ids: tuple[int, ...]


class Task(Protocol):
    """What is learnt. The loop calls these and knows nothing else of the task."""

    head: ModelHead

    @property
    def encoder(self) -> Encode:
        """Return what `encode` does as something to send to other processes: the lighter, the sooner they start."""

    def encode(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return what becomes of each row: features, None where there is nothing to learn from, or what is wrong.

        Never raises for a row: whoever calls knows where it stands, and tells.
        """

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the samples padded and stacked as one microbatch."""

    def filler(self, features: Features) -> Batch:
        """Return a batch in the shape of one sample with no targets, for a rank that has no row left to evaluate."""

    def count_targets(self, batch: Batch) -> int:
        """Return the number of targets, before any forward pass."""

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss summed over the targets, a float32 scalar."""

    def metric_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return named sums (scalars) over the batch that may be added up over batches and ranks."""

    def metrics(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics that the added-up sums amount to; `loss` is always among them."""

    def prompt(self, features: Features) -> Prompt | None:
        """Return what to ask the model for this sample and what it should answer; None where nothing is asked."""
