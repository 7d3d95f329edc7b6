"""Base class of the tasks."""

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
from finetune.errors import DataError
from finetune.runtime.files.recorded_names import recorded_as
from finetune.task.protocol import DataFacts, EvaluationOutput, GenerationPrompt, ModelHead, Precomputed, SampleSpec


class BaseTask:
    """Defaults of the Task protocol. A task defines `collate`, `loss_sums`, `metric_sums`, `metrics` and an encoder."""

    head: ModelHead = "causal_lm"
    _encoder: Encode | None = None  # encodes rows, cheap to send to other processes; None: `encode_row` does

    @property
    def head_values(self) -> Mapping[str, Any]:
        """Return no values: the model's config is not changed."""
        return {}

    @property
    def samples(self) -> SampleSpec:
        """Return that rows are encoded by `_encoder` or by the task itself, with the length limit of `data:`."""
        return SampleSpec(self._encoder or self.encode)

    @property
    def data_facts(self) -> DataFacts:
        """Return no facts: the task does not depend on the rows."""
        return DataFacts()

    @property
    def precomputed(self) -> Precomputed | None:
        """Return None: nothing is precomputed."""
        return None

    def export_files(self, config: Any) -> Mapping[str, Any]:
        """Return no files: transformers needs no others."""
        return {}

    @recorded_as("task.base.BaseTask.encode")
    def encode(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return the features of each row, None for a row without targets, or the row's error."""
        if self._encoder is not None:
            return self._encoder(rows)
        return [result_or_error(self.encode_row, row) for row in rows]

    def encode_row(self, row: Row) -> Features | None:
        """Return the features of one row, of its last sample if there are several; raises its DataError.

        A task defines this or `encode`, which is faster.
        """
        (outcome,) = self.encode([row])
        if isinstance(outcome, DataError):
            raise outcome
        return outcome[-1] if isinstance(outcome, tuple) else outcome

    @abstractmethod
    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the samples as one microbatch."""

    def dummy_batch(self, features: Features) -> Batch:
        """Return the sample as a batch without targets."""
        batch = self.collate([features])
        targets = None if batch.targets is None else batch.targets.none
        labels = torch.full_like(batch.labels, IGNORED)
        return replace(batch, labels=labels, targets=targets, num_targets=0, num_tokens=0, sample_ids=())

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the batches unchanged: the loss of a microbatch does not depend on the others."""
        return batches

    @abstractmethod
    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum`, summed over the targets, and other sums: float32 scalars."""

    def step_metrics(self, sums: Mapping[str, float], *, num_targets: int) -> Mapping[str, float]:
        """Return the mean over the targets of every other sum."""
        others = {name: value for name, value in sums.items() if name != "loss_sum"}
        return {name: value / num_targets for name, value in others.items()} if num_targets else {}

    def metric_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the sums of `evaluate_batch`. A task defines this, or `evaluate_batch` if it has records."""
        return self.evaluate_batch(model, batch).sums

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> EvaluationOutput:
        """Return the sums without records."""
        return EvaluationOutput(self.metric_sums(model, batch))

    @abstractmethod
    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return the metrics, including `loss`."""

    def label_text(self, features: Features) -> str:
        """Return an empty text: the target tokens are the label."""
        return ""

    def prompt(self, features: Features) -> GenerationPrompt | None:
        """Return None: the task does not generate."""
        return None
