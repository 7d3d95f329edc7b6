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
from finetune.data.features import Features, Outcome
from finetune.data.rows import Row
from finetune.data.token_cache.chunks import Encode
from finetune.data.token_cache.lengths import LengthLimit
from finetune.data.workers import LoadingCost


def no_rows() -> Iterable[Row]:
    """Return no rows."""
    return ()


@dataclass(frozen=True)
class TaskContext:
    """What a task may be built from. What a task needs and is not there is an error of ours, not the user's."""

    section: TaskSection
    data: DataSection
    tokenizer: Any = None  # a PreTrainedTokenizerBase; None for images alone
    processor: Any = None  # an image processor, or a processor of images and text; None for text alone
    rows: Callable[[], Iterable[Row]] = no_rows  # the training rows as their formats read them
    facts: Mapping[str, Any] | None = None  # what an earlier start of the run has read from the rows
    loss_kernel: LossKernel = "auto"


ModelHead = Literal[
    "causal_lm",
    "seq2seq_lm",
    "masked_lm",
    "sequence_classification",
    "token_classification",
    "image_classification",
    "image_text_to_text",
]
"""Which head the model gets; the model wing maps it to an Auto class of transformers."""

__all__ = ["EvaluationOutput", "GenerationPrompt", "ModelHead", "Precomputed", "Row", "Task", "TaskContext"]


@dataclass(frozen=True)
class GenerationPrompt:
    """What the model is asked in a generation, and what it should answer."""

    input_ids: tuple[int, ...]
    reference_ids: tuple[int, ...]
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # what else the model is given, such as pixels
    companion_ids: tuple[int, ...] = ()  # a row that the model reads with it and does not answer: it shows the images
    per_token: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)  # of its row, and of the other


@dataclass(frozen=True)
class EvaluationOutput:
    """What an evaluation takes from a batch."""

    sums: Mapping[str, Tensor]  # scalars that may be added up over batches and ranks
    records: Tensor | None = None  # [records, k]: what metrics that are no sums need; column 0 is the sample's id


@dataclass(frozen=True)
class Precomputed:
    """What must be known of each sample beforehand: worked out once, by a model that does not learn, kept as data."""

    title: str  # what it is, for messages: `reference log-probabilities`
    scorer: Literal["reference", "teacher"]  # the model that the run starts from, or another one
    identity: Mapping[str, Any]  # JSON: what of the task decides the arrays, beside the samples and the model
    compute: Callable[[nn.Module, Batch], Sequence[Mapping[str, np.ndarray]]]
    """From a model that evaluates and a batch to the arrays (1-D, by name) of each of its samples, in their order.

    The samples deliver these arrays in `Features.arrays` from then on, behind their own. One forward pass or more, for
    a batch without samples likewise: collective where the model is.
    """


class Task(Protocol):
    """What is learnt. The loop calls these and knows nothing else of the task."""

    head: ModelHead
    loading_cost: LoadingCost  # what a sample costs the loader

    @property
    def has_partners(self) -> bool:
        """Tell whether each sample is learnt together with another one, which `Features.partner` then holds."""

    @property
    def head_values(self) -> Mapping[str, Any]:
        """Return values of the model's config that the task decides, such as `num_labels`."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return what was read from the training rows, as JSON: with it the task is built again without them."""

    @property
    def found(self) -> tuple[str, ...]:
        """Return lines for the user on what was read from the training rows."""

    @property
    def encoding(self) -> Mapping[str, Any]:
        """Return, as JSON, what of the task's own settings and facts decides what `encode` makes of a row."""

    @property
    def lengths(self) -> LengthLimit | None:
        """Return how long a sample may be and what becomes of a longer one; None: as `data.max_length` says."""

    @property
    def encoder(self) -> Encode:
        """Return what `encode` does as something to send to other processes: the lighter, the sooner they start."""

    @property
    def precomputed(self) -> Precomputed | None:
        """Return what must be known of each sample beforehand; None where that is nothing."""

    def encode(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return what becomes of each row: features, None where there is nothing to learn from, or what is wrong.

        Never raises for a row: whoever calls knows where it stands, and tells.
        """

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the samples padded and stacked as one microbatch.

        What is random here is drawn from `(features.seed, features.sample_id)`: it then depends on no world size.
        """

    def dummy_batch(self, features: Features) -> Batch:
        """Return a batch in the shape of one sample with no targets, for a rank that has no row left to evaluate."""

    def count_targets(self, batch: Batch) -> int:
        """Return the number of targets, before any forward pass."""

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return this rank's microbatches of one step with what their losses must know of the whole step. Collective.

        Leaves gradients and random numbers as they are.
        """

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss summed over the targets, a float32 scalar."""

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum` and, detached, whatever else the log of a step is made of: scalars that may be added up.

        The names are the same for every batch.
        """

    def step_metrics(self, sums: Mapping[str, float], *, num_targets: int) -> Mapping[str, float]:
        """Return what the log of a step shows of those sums beside the loss."""

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> EvaluationOutput:
        """Return what an evaluation takes from the batch."""

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return the metrics that the added-up sums and the records of all ranks amount to; `loss` is among them.

        The records are float64 on the CPU, [records, k], in the order of the sample ids, each sample's once.
        """

    def answer(self, features: Features) -> str:
        """Return in words what is to be found out about the sample; empty where its tokens say it."""

    def prompt(self, features: Features) -> GenerationPrompt | None:
        """Return what to ask the model for this sample and what it should answer; None where nothing is asked."""
