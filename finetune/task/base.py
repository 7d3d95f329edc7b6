"""Base class of the tasks, and the formats of rows that tasks require."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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


@recorded_as("task.expecting.OnlyTurns")
@dataclass(frozen=True)
class RequireMessages:
    """Encodes rows with `messages`; the error of other rows advises how to map them."""

    encode: Callable[[Sequence[Row]], Sequence[Outcome]]

    def __call__(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return the features or the error of each row."""
        if any("messages" not in row for row in rows):  # all rows of a source have one format
            return [DataError(_no_messages(rows[0]))] * len(rows)
        if any(row.get("images") for row in rows):
            return [DataError(_WITH_IMAGES)] * len(rows)
        return self.encode(rows)


@recorded_as("task.expecting.PicturedTurns")
@dataclass(frozen=True)
class RequireImageMessages:
    """Encodes rows with `messages`, optionally with images."""

    encode: Callable[[Sequence[Row]], Sequence[Outcome]]

    def __call__(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return the features or the error of each row."""
        if any("messages" not in row for row in rows):
            return [DataError("the row has no turns. Write `messages`, or another format of turns.")] * len(rows)
        return self.encode(rows)


@recorded_as("task.expecting.OnlyText")
@dataclass(frozen=True)
class RequireText:
    """Encodes rows with only a text; the error of other rows advises how to map them."""

    encode: Callable[[Sequence[Row]], Sequence[Outcome]]
    task: str = "pretrain"

    def __call__(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return the features or the error of each row."""
        if any(row.keys() != {"text"} for row in rows):  # all rows of a source have one format
            content = "a label" if "label" in rows[0] else "turns"
            remedy = "Use task `sft`, or format `text`." if self.task == "pretrain" else "Set `format: text`."
            message = f"task `{self.task}` trains on plain text, but the row has {content}. {remedy}"
            return [DataError(message)] * len(rows)
        return self.encode(rows)


_WITH_IMAGES = (
    "the row has images, but this task only reads text. Write `task.name: vision_language_sft` with a model that "
    "reads images."
)


def _no_messages(row: Row) -> str:
    if "chosen" in row:
        return (
            "task `sft` trains on turns, but the row is a preference pair. To train on the chosen answer, "
            "set `format: prompt_completion` with `columns: {completion: chosen}`, or write a `template`."
        )
    if "label" in row:
        return (
            "task `sft` trains on turns, but the row is a labeled text. To train on the label as an answer, set "
            "`format: prompt_completion` with `template: {prompt: '{{ text }}', completion: '{{ label }}'}`."
        )
    return "task `sft` trains on turns, but the row is plain text. Use task `pretrain`, or another format."


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
