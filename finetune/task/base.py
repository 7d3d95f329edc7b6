"""What every task may inherit."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from finetune.data.batch import IGNORED, Batch
from finetune.data.features import Features, Outcome, result_or_error
from finetune.data.rows import Row
from finetune.data.token_cache.chunks import Encode
from finetune.data.token_cache.lengths import LengthLimit
from finetune.data.workers import LoadingCost
from finetune.errors import DataError
from finetune.runtime.recorded import recorded_as
from finetune.task.protocol import EvaluationOutput, GenerationPrompt, ModelHead, Precomputed


class BaseTask:
    """Defaults of the seam. A task defines `collate`, `loss_sum`, `metric_sums`, `metrics`, and how to encode."""

    head: ModelHead = "causal_lm"
    _encoder: Encode | None = None  # what encodes rows, light enough for other processes; None: `encode_row` does
    loading_cost: LoadingCost = "light"

    @property
    def has_partners(self) -> bool:
        """Return False: a sample is learnt by itself."""
        return False

    @property
    def head_values(self) -> Mapping[str, Any]:
        """Return nothing: the model's config stays as it is."""
        return {}

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return nothing: the rows decide nothing."""
        return {}

    @property
    def found(self) -> tuple[str, ...]:
        """Return nothing: there is nothing to say of what was read from the rows."""
        return ()

    @property
    def encoding(self) -> Mapping[str, Any]:
        """Return nothing: tokenizer and `data:` decide alone."""
        return {}

    @property
    def lengths(self) -> LengthLimit | None:
        """Return None: `data.max_length` holds for the whole sample."""
        return None

    @property
    def encoder(self) -> Encode:
        """Return what `encode` does as something that other processes can be sent: `_encoder`, else the task itself."""
        return self._encoder or self.encode

    @property
    def precomputed(self) -> Precomputed | None:
        """Return None: a sample is known from its row alone."""
        return None

    @recorded_as("task.base.BaseTask.encode")
    def encode(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return each row's features, None where nothing is to be learnt, or what is wrong."""
        if self._encoder is not None:
            return self._encoder(rows)
        return [result_or_error(self.encode_row, row) for row in rows]

    def encode_row(self, row: Row) -> Features | None:
        """Return what becomes of one row; raises its DataError. A task defines this or `encode`, which is faster."""
        (outcome,) = self.encode([row])
        if isinstance(outcome, DataError):
            raise outcome
        return outcome

    @abstractmethod
    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the samples as one microbatch."""

    def dummy_batch(self, features: Features) -> Batch:
        """Return the sample as a batch in which nothing counts."""
        batch = self.collate([features])
        targets = None if batch.targets is None else batch.targets.none
        labels = torch.full_like(batch.labels, IGNORED)
        return replace(batch, labels=labels, targets=targets, num_targets=0, num_tokens=0, sample_ids=())

    def count_targets(self, batch: Batch) -> int:
        """Return the number of targets, known since collation."""
        return batch.num_targets

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the batches as they are: a microbatch's loss does not depend on the others."""
        return batches

    @abstractmethod
    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss summed over the targets, a float32 scalar."""

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the loss alone."""
        return {"loss_sum": self.loss_sum(model, batch)}

    def step_metrics(self, sums: Mapping[str, float], *, num_targets: int) -> Mapping[str, float]:
        """Return the mean over the targets of all that was summed beside the loss."""
        others = {name: value for name, value in sums.items() if name != "loss_sum"}
        return {name: value / num_targets for name, value in others.items()} if num_targets else {}

    @abstractmethod
    def metric_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return named sums (scalars) over the batch that may be added up over batches and ranks."""

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> EvaluationOutput:
        """Return the sums alone."""
        return EvaluationOutput(self.metric_sums(model, batch))

    @abstractmethod
    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return the metrics; `loss` is among them."""

    def answer(self, features: Features) -> str:
        """Return nothing: the tokens that are learnt say it."""
        return ""

    def prompt(self, features: Features) -> GenerationPrompt | None:
        """Return None: nothing is asked."""
        return None
