"""The interface of a task, with defaults: it encodes rows to features, collates features, computes the loss of a batch.

Every task is built from a `TaskContext`.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config.sections.data import DataSection
from finetune.config.sections.task import TaskSection
from finetune.config.sections.train import LossKernel
from finetune.data.batch import IGNORED, Batch
from finetune.data.features import Features, Outcome, Unlabeled, result_or_error
from finetune.data.formats.columns import Columns
from finetune.data.formats.conversations import PLACEHOLDER, UNREAD_IMAGE
from finetune.data.loader import LoadingCost
from finetune.data.rows import Row
from finetune.data.token_cache.chunks import Encode
from finetune.data.token_cache.lengths import LengthLimit
from finetune.errors import DataError
from finetune.registry.losses import PREFERENCE_LOSSES
from finetune.registry.table import import_attribute, options_of
from finetune.registry.tasks import TASKS, ModelHead


@dataclass(frozen=True)
class TaskContext:
    """The inputs of a task's constructor. A missing part that the task needs is a bug, not a user's error."""

    section: TaskSection
    data: DataSection
    tokenizer: Any = None  # a PreTrainedTokenizerBase; None for image-only tasks
    processor: Any = None  # an image processor, or a processor of images and text; None for text-only tasks
    rows: Callable[[], Iterable[Row]] = tuple  # the training rows
    facts: Mapping[str, Any] | None = None  # `DataFacts.values` of an earlier start of the run
    loss_kernel: LossKernel = "auto"


@dataclass(frozen=True)
class GenerationPrompt:
    """A prompt for a generation, and the reference answer."""

    input_ids: tuple[int, ...]
    reference_ids: tuple[int, ...]
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # further inputs of the model, such as pixels
    companion_ids: tuple[int, ...] = ()  # a second row with a blank image, for a prompt without images
    per_token: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)  # per-token inputs, by row


@dataclass(frozen=True)
class EvaluationOutput:
    """The evaluation results of a batch."""

    sums: Mapping[str, Tensor]  # scalars, summed over batches and ranks
    records: Tensor | None = None  # [records, k], for metrics that are not sums; column 0 is the sample id


@dataclass(frozen=True)
class Precomputed:
    """Per-sample arrays that a frozen model computes once before training; they are stored next to the dataset."""

    title: str  # for messages: `reference log-probabilities`
    scorer: Literal["reference", "teacher"]  # the model that the run starts from, or another one
    identity: Mapping[str, Any]  # JSON: the settings of the task on which the arrays depend
    compute: Callable[[nn.Module, Batch], Sequence[Mapping[str, np.ndarray]]]
    """Computes the arrays (1-D, by name) of every sample of a batch in order, with a model in evaluation mode.

    They are then part of `Features.arrays`. A batch without samples runs as many forward passes as any other batch, and
    the call is collective if the model's forward is.
    """
    example: Mapping[str, np.ndarray] = field(default_factory=dict)  # arrays of a sample, with any values


@dataclass(frozen=True)
class Predictor:
    """How a task predicts rows, which need no label."""

    read: Callable[[Columns], Row]  # the columns that it needs; raises DataError without them
    encode: Encode  # rows to one or several samples each, of one forward pass; None for a row without content
    collate: Callable[[Sequence[Features]], Batch]
    outputs: Callable[[nn.Module, Batch], Iterable[Tensor]]  # of every sample in order: probabilities, scores, a vector
    prediction: Callable[[Row, Sequence[Tensor]], Mapping[str, Any]]
    """Returns a row's prediction from the outputs of its samples, float32 on the CPU, as JSON values by name."""
    limit: LengthLimit | None = None  # shortens or splits longer samples; None: the encoder has done so


@dataclass(frozen=True)
class SampleSpec:
    """The data package's view of a task: how its rows are encoded to samples."""

    encode: Encode
    """Encodes rows to features, to None for a row without targets, or to the row's error.

    Never raises for a row: the caller knows the row's location and reports the error. It is pickled to other processes:
    the smaller it is, the sooner they start.
    """
    length_limit: LengthLimit | None = None  # handles samples that are too long; None: as configured in `data:`
    loading_cost: LoadingCost = "light"  # of a sample in the data loader
    has_partners: bool = False  # every sample is trained together with another one, `Features.partner`
    identity: Mapping[str, Any] = field(default_factory=dict)  # JSON: settings and facts on which `encode` depends


@dataclass(frozen=True)
class DataFacts:
    """Facts that the task read from the training rows, such as the class names."""

    values: Mapping[str, Any] = field(default_factory=dict)  # JSON: the task can be rebuilt from them without the rows
    lines: tuple[str, ...] = ()  # log lines about them


_NOT_TURNS = {
    "chosen": "a preference pair. To train on the chosen answer, set `format: prompt_completion` with "
    "`columns: {completion: chosen}`, or write a `template`.",
    "label": "a labeled text. To train on the label as an answer, set `format: prompt_completion` with "
    "`template: {prompt: '{{ text }}', completion: '{{ label }}'}`.",
}
"""What a row with this column is instead of turns, and what to do."""


@dataclass(frozen=True)
class RequireMessages:
    """Encodes rows with `messages`; the error of other rows advises how to map them."""

    encode: Encode
    reads_images: bool = False

    def __call__(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return the features or the error of each row."""
        if any("messages" not in row for row in rows):  # all rows of a source have one format
            plain = "plain text. Use task `pretrain`, or another format."
            content = next((text for column, text in _NOT_TURNS.items() if column in rows[0]), plain)
            task = "vision_language_sft" if self.reads_images else "sft"
            return [DataError(f"task `{task}` trains on turns, but the row is {content}")] * len(rows)
        if not self.reads_images and any(row.get("images") for row in rows):
            message = (
                "the row has images, but this task only reads text. Write `task.name: vision_language_sft` with a "
                "model that reads images."
            )
            return [DataError(message)] * len(rows)
        remedy = "" if self.reads_images else " and `task.name: vision_language_sft`"
        has_image = [self.reads_images or PLACEHOLDER in str(row["messages"]) for row in rows]
        unread = [row.get(UNREAD_IMAGE) if has else None for row, has in zip(rows, has_image, strict=True)]
        encoded = iter(self.encode([row for row, column in zip(rows, unread, strict=True) if not column]))
        return [
            DataError(
                f"has images in the column `{column}`, which are not read. Write `columns: {{images: {column}}}`"
                f"{remedy}."
            )
            if column
            else next(encoded)
            for column in unread
        ]


@dataclass(frozen=True)
class RequireText:
    """Encodes rows with only a text; the error of other rows advises how to map them."""

    encode: Encode
    task: str = "pretrain"

    def __call__(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return the features or the error of each row."""
        if any(row.keys() != {"text"} for row in rows):  # all rows of a source have one format
            content = "a label" if "label" in rows[0] else "turns"
            remedy = "Use task `sft`, or format `text`." if self.task == "pretrain" else "Set `format: text`."
            message = f"task `{self.task}` trains on plain text, but the row has {content}. {remedy}"
            return [DataError(message)] * len(rows)
        return self.encode(rows)


class BaseTask:
    """A training task. The training loop uses only its public members.

    A task defines `collate`, `loss_sums`, `metrics`, an encoder, and `metric_sums` or `evaluate_batch`.
    """

    head: ModelHead = "causal_lm"
    head_values: Mapping[str, Any] = MappingProxyType({})  # model config values that it determines, as `num_labels`
    data_facts = DataFacts()  # what it read from the training rows
    options: Any  # of a plugin's task: its `plugin_options`
    # of its samples; see SampleSpec
    _encoder: Encode | None = None  # encodes rows, cheap to send to other processes; None: `encode_row` does
    _length_limit: LengthLimit | None = None
    _loading_cost: LoadingCost = "light"
    _has_partners: bool = False
    _identity: Mapping[str, Any] = MappingProxyType({})

    @property
    def samples(self) -> SampleSpec:
        """Return the encoding of rows to samples: by the encoder, or by what a subclass defines in its stead."""
        own = type(self)
        is_overridden = own.encode is not BaseTask.encode or own.encode_row is not BaseTask.encode_row
        encode = self.encode if self._encoder is None or is_overridden else self._encoder
        return SampleSpec(encode, self._length_limit, self._loading_cost, self._has_partners, self._identity)

    @property
    def precomputed(self) -> Precomputed | None:
        """Return the arrays that a frozen model must compute per sample before training; None if there are none."""
        return None

    @property
    def predictor(self) -> Predictor | None:
        """Return how it predicts rows; None for a task whose model generates text, or that does not."""
        return None

    def export_files(self, config: Any) -> Mapping[str, Any]:
        """Return the JSON files to export with a model of this config, by relative path."""
        return {}

    def encode(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return the features of each row, None for a row without targets, or the row's error."""
        if self._encoder is not None and type(self).encode_row is BaseTask.encode_row:
            return self._encoder(rows)
        return [result_or_error(self.encode_row, row) for row in rows]

    def encode_row(self, row: Row) -> Features | None:
        """Return the features of one row, of its last sample if there are several; raises its DataError.

        A task defines this or `encode`, which is faster.
        """
        is_overridden = type(self).encode_row is not BaseTask.encode_row
        encode = self._encoder if is_overridden and self._encoder is not None else self.encode
        (outcome,) = encode([row])
        if isinstance(outcome, DataError):
            raise outcome
        if isinstance(outcome, Unlabeled):
            return None
        return outcome[-1] if isinstance(outcome, tuple) else outcome

    @abstractmethod
    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the samples padded and stacked as one microbatch.

        Random numbers are seeded with `(features.seed, features.sample_id)`, so they do not depend on the world size.
        """

    def dummy_batch(self, features: Features) -> Batch:
        """Return a batch with the shape of one sample but no targets, for a rank without remaining evaluation rows."""
        batch = self.collate([features])
        targets = None if batch.targets is None else batch.targets.none
        labels = torch.full_like(batch.labels, IGNORED)
        return replace(batch, labels=labels, targets=targets, num_targets=0, num_tokens=0, sample_ids=())

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return this rank's microbatches of one step with the values that their losses need from the whole step.

        Does not change gradients or the random state. Collective.
        """
        return batches

    @abstractmethod
    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum`, the loss summed over the targets, and, detached, the other sums that a step logs.

        All are float32 scalars. The names are the same for every batch.
        """

    def step_metrics(self, sums: Mapping[str, float], *, num_targets: int) -> Mapping[str, float]:
        """Return a step's logged metrics from the sums of all ranks: the mean of all but the loss over the targets."""
        others = {name: value for name, value in sums.items() if name != "loss_sum"}
        return {name: value / num_targets for name, value in others.items()} if num_targets else {}

    def metric_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the sums of `evaluate_batch`. A task defines this, or `evaluate_batch` if it has records."""
        return self.evaluate_batch(model, batch).sums

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> EvaluationOutput:
        """Return the evaluation results of the batch."""
        return EvaluationOutput(self.metric_sums(model, batch))

    @abstractmethod
    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return the metrics, including `loss`, from the sums and records of all ranks.

        The records are float64 on the CPU, [records, k], ordered by sample id, each sample's once.
        """

    def row_losses(self, records: Tensor) -> Tensor | None:
        """Return the loss of every row, [rows], where only the records have it; None where rows have none."""
        return None

    def label_text(self, features: Features) -> str:
        """Return the label of the sample as text; empty if its tokens are the label."""
        return ""

    def prompt(self, features: Features) -> GenerationPrompt | None:
        """Return the sample's generation prompt and reference answer; None if the task does not generate."""
        return None


Task = BaseTask
"""What `task.name` chooses; a task of a plugin may also be another class with these members."""


def build_task(context: TaskContext) -> Task:
    """Return the job's task; raises DataError if tokenizer or rows are unsuitable for it.

    The options of a plugin's task are an argument of a constructor that has `options`, else an attribute.
    """
    name = context.section.name
    entry = TASKS[name]
    build = import_attribute(entry.implementation)
    if entry.options is not None and "options" in inspect.signature(build).parameters:
        task = build(context, options=options_of(entry))
    else:
        task = build(context)
    optional = ("predictor", "row_losses")
    members = [member for member in vars(BaseTask) if not member.startswith("_") and member not in optional]
    if missing := [member for member in members if not hasattr(task, member)]:
        expected = f"a task, which has {', '.join(missing)}: derive it from one of `finetune.task`"
        raise TASKS.refusal(name, task, expected)
    if entry.options is not None and not hasattr(task, "options"):
        task.options = options_of(entry)
    return cast(Task, task)


def preference_task(context: TaskContext) -> Task:
    """Return the task of the configured preference loss; that of KTO has single answers instead of pairs."""
    return cast(Task, import_attribute(PREFERENCE_LOSSES[context.section.preference.loss].task)(context))
