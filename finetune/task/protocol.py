"""The Task protocol, one of the two seams: rows become features, features batches, batches a summed loss.

`TaskContext` is what every task is built from.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor, nn

from finetune.config.sections.data import DataSection
from finetune.config.sections.task import TaskSection
from finetune.config.sections.train import LossKernel
from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.data.rows import Row
from finetune.data.token_cache.chunks import Encode
from finetune.data.token_cache.lengths import LengthLimit
from finetune.data.workers import LoadingCost
from finetune.registry.tasks import ModelHead


def no_rows() -> Iterable[Row]:
    """Return no rows."""
    return ()


@dataclass(frozen=True)
class TaskContext:
    """What a task is built from. A part that a task needs and that is missing is our error, not the user's."""

    section: TaskSection
    data: DataSection
    tokenizer: Any = None  # a PreTrainedTokenizerBase; None for images alone
    processor: Any = None  # an image processor, or a processor of images and text; None for text alone
    rows: Callable[[], Iterable[Row]] = no_rows  # the training rows
    facts: Mapping[str, Any] | None = None  # `DataFacts.values` of an earlier start of the run
    loss_kernel: LossKernel = "auto"


__all__ = ["EvaluationOutput", "GenerationPrompt", "ModelHead", "Precomputed", "Row", "Task", "TaskContext"]


@dataclass(frozen=True)
class GenerationPrompt:
    """A prompt for a generation, and the reference answer."""

    input_ids: tuple[int, ...]
    reference_ids: tuple[int, ...]
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # further inputs of the model, such as pixels
    companion_ids: tuple[int, ...] = ()  # a second row with a blank image, for a prompt without images
    per_token: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)  # inputs of each token of a row


@dataclass(frozen=True)
class EvaluationOutput:
    """What an evaluation keeps of a batch."""

    sums: Mapping[str, Tensor]  # scalars, summed over batches and ranks
    records: Tensor | None = None  # [records, k]: what metrics that are not sums need; column 0 is the sample's id


@dataclass(frozen=True)
class Precomputed:
    """Arrays of each sample that a frozen model computes once, before training; they are stored next to the dataset."""

    title: str  # for messages: `reference log-probabilities`
    scorer: Literal["reference", "teacher"]  # the model that the run starts from, or another one
    identity: Mapping[str, Any]  # JSON: the settings of the task on which the arrays depend
    compute: Callable[[nn.Module, Batch], Sequence[Mapping[str, np.ndarray]]]
    """From a model in evaluation mode and a batch to the arrays (1-D, by name) of each sample, in order.

    From then on the samples hold these arrays in `Features.arrays`, too. A batch without samples takes as many forward
    passes as any other: collective where the model is.
    """


@dataclass(frozen=True)
class SampleSpec:
    """How the rows of a task become samples, as far as the data package must know."""

    encode: Encode
    """From rows to the features of each, None where there is nothing to train on, or the error of the row.

    Never raises for a row: the caller knows its place and reports it. It is sent to other processes: the less it holds,
    the sooner they start.
    """
    length_limit: LengthLimit | None = None  # what is done with samples that are too long; None: as `data:` says
    loading_cost: LoadingCost = "light"  # of a sample in the data loader
    has_partners: bool = False  # each sample is trained together with another one, `Features.partner`
    identity: Mapping[str, Any] = field(default_factory=dict)  # JSON: settings and facts on which `encode` depends


@dataclass(frozen=True)
class DataFacts:
    """What the task read from the training rows, such as the names of the classes."""

    values: Mapping[str, Any] = field(default_factory=dict)  # JSON: a task is built again from them, without the rows
    lines: tuple[str, ...] = ()  # the same for the user


class Task(Protocol):
    """What is trained. The loop calls these members and knows nothing else about the task."""

    head: ModelHead

    @property
    def head_values(self) -> Mapping[str, Any]:
        """Return values of the model's config that the task decides, such as `num_labels`."""

    @property
    def samples(self) -> SampleSpec:
        """Return how rows become samples."""

    @property
    def data_facts(self) -> DataFacts:
        """Return what the task read from the training rows."""

    @property
    def precomputed(self) -> Precomputed | None:
        """Return what a frozen model must compute for each sample before training; None for nothing."""

    def export_files(self, config: Any) -> Mapping[str, Any]:
        """Return JSON files to write next to the exported model of this config, by relative path."""

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the samples padded and stacked as one microbatch.

        Random numbers are drawn from `(features.seed, features.sample_id)`, so they do not depend on the world size.
        """

    def dummy_batch(self, features: Features) -> Batch:
        """Return a batch in the shape of one sample without targets, for a rank that has no rows left to evaluate."""

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return this rank's microbatches of one step with what their losses need from the whole step. Collective.

        Leaves gradients and random numbers as they are.
        """

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum`, the loss summed over the targets, and, detached, the other sums that a step logs.

        All are float32 scalars. The names are the same for every batch.
        """

    def step_metrics(self, sums: Mapping[str, float], *, num_targets: int) -> Mapping[str, float]:
        """Return what a step logs of the world's sums besides the loss."""

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> EvaluationOutput:
        """Return what an evaluation keeps of the batch."""

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return the metrics of the sums and records of all ranks, `loss` among them.

        The records are float64 on the CPU, [records, k], ordered by sample id, each sample's once.
        """

    def label_text(self, features: Features) -> str:
        """Return the label of the sample as text; empty where its tokens are the label."""

    def prompt(self, features: Features) -> GenerationPrompt | None:
        """Return the prompt of the sample and its reference answer for a generation; None for no generation."""
