"""The tasks that `task.name` chooses from, and the metrics of their evaluations."""

from dataclasses import dataclass
from typing import Literal

from finetune.errors import RegistryError
from finetune.registry.table import Entry, Table

ModelHead = Literal[
    "causal_lm",
    "seq2seq_lm",
    "masked_lm",
    "sequence_classification",
    "token_classification",
    "image_classification",
    "image_text_to_text",
    "embedding",
]
"""The head that a model gets; the model package maps it to an Auto class of transformers."""

InputKind = Literal["text", "images", "both"]

SampleContent = Literal["tokens", "tokens_and_label", "tokens_and_tags", "texts", "source_and_target", "image"]
"""What a sample has: its tokens, with one label or one per token; several texts, padded to one length; ..."""


@dataclass(frozen=True, kw_only=True)
class TaskEntry(Entry):
    """A task. Its implementation is called with a `task.protocol.TaskContext` and returns a `task.protocol.Task`."""

    head: ModelHead
    formats: tuple[str, ...]  # of the rows that it reads
    metrics: tuple[str, ...]  # of every evaluation, without generated answers
    reads: InputKind = "text"
    sample: SampleContent = "tokens"
    section: str | None = None  # of `task`, which it alone, or with its relatives, reads
    may_share_rows: bool = False  # samples may be concatenated instead of padded
    may_be_packed: bool = False  # a position of the data order may be a pack of samples
    may_be_sliced: bool = False  # ranks may share the tokens of a row: the loss is a sum over tokens
    may_be_split: bool = True  # a long row may become several whole samples
    is_chat: bool = False  # rows are rendered by a chat template
    chooses_turns: bool = False  # `data.train_on` chooses the turns that are targets
    generates: bool = False  # it can be evaluated on generated answers
    takes_prompt_adapters: bool = False  # its head reads every position
    takes_embedding_noise: bool = False
    watches_routers: bool = False  # of a mixture of experts
    has_token_loss: bool = False  # a cross-entropy over the vocabulary, with a choice of kernels
    smooths_labels: bool = False  # its loss is a cross-entropy
    has_row_losses: bool = False  # every row has a loss: `evaluate --against` compares two models row by row

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.formats or not self.implementation or "loss" not in self.metrics:
            raise RegistryError(f"task `{self.name}`: it needs formats, an implementation and the metric `loss`.")
        if self.may_be_packed and not self.may_share_rows:
            raise RegistryError(f"task `{self.name}`: a pack is a row that samples share.")

    @property
    def has_tokens(self) -> bool:
        """Return whether its samples have tokens."""
        return self.reads != "images"

    @property
    def has_images(self) -> bool:
        """Return whether its rows may have images."""
        return self.reads != "text"

    @property
    def over_length(self) -> tuple[str, ...]:
        """Return the values of `data.over_length` that make longer rows fit: a cut could go through an image."""
        if self.has_images:
            return ("drop",)
        return ("truncate", "split", "drop") if self.may_be_split else ("truncate", "drop")

    @property
    def has_several_texts(self) -> bool:
        """Return whether a sample has several texts, which are padded to the same length."""
        return self.sample == "texts"

    @property
    def can_chat(self) -> bool:
        """Return whether `finetune chat` can talk to its models."""
        return self.head in ("causal_lm", "image_text_to_text")

    @property
    def classifies(self) -> bool:
        """Return whether it reads `task.classification`."""
        return self.section == "classification"


_CHAT_FORMATS = ("messages", "conversations", "prompt_completion", "instruction")
TOKEN_METRICS = ("loss", "perplexity", "token_accuracy")
PAIR_METRICS = ("loss", "preference_accuracy", "reward_margin", "reward_chosen", "reward_rejected")
_PACKAGE = "finetune.task"

TASKS = Table(
    "task",
    TaskEntry,
    (
        TaskEntry(
            name="sft",
            description="predict the assistant's turns, end-of-turn included",
            implementation=f"{_PACKAGE}.causal_lm:SftTask",
            head="causal_lm",
            formats=_CHAT_FORMATS,
            metrics=TOKEN_METRICS,
            may_share_rows=True,
            may_be_packed=True,
            may_be_sliced=True,
            is_chat=True,
            chooses_turns=True,
            generates=True,
            takes_prompt_adapters=True,
            takes_embedding_noise=True,
            watches_routers=True,
            has_token_loss=True,
            smooths_labels=True,
            has_row_losses=True,
        ),
        TaskEntry(
            name="pretrain",
            description="predict every token of a text",
            implementation=f"{_PACKAGE}.causal_lm:PretrainTask",
            head="causal_lm",
            formats=("text",),
            metrics=TOKEN_METRICS,
            may_share_rows=True,
            may_be_packed=True,
            may_be_sliced=True,
            takes_prompt_adapters=True,
            takes_embedding_noise=True,
            watches_routers=True,
            has_token_loss=True,
            smooths_labels=True,
            has_row_losses=True,
        ),
        TaskEntry(
            name="seq2seq",
            description="an encoder-decoder writes the answer",
            implementation=f"{_PACKAGE}.causal_lm:Seq2SeqTask",
            head="seq2seq_lm",
            formats=("prompt_completion", "instruction"),
            metrics=TOKEN_METRICS,
            sample="source_and_target",
            section="seq2seq",
            may_be_split=False,
            generates=True,
            takes_prompt_adapters=True,
            takes_embedding_noise=True,
            has_token_loss=True,
            smooths_labels=True,
            has_row_losses=True,
        ),
        TaskEntry(
            name="masked_lm",
            description="predict masked tokens",
            implementation=f"{_PACKAGE}.causal_lm:MaskedLmTask",
            head="masked_lm",
            formats=("text",),
            metrics=("loss", "perplexity", "masked_accuracy"),
            section="masked_lm",
            may_share_rows=True,
            takes_embedding_noise=True,
            has_token_loss=True,
            smooths_labels=True,
        ),
        TaskEntry(
            name="preference",
            description="prefer the chosen answer of a pair (`task.preference.loss`)",
            implementation=f"{_PACKAGE}.protocol:preference_task",
            head="causal_lm",
            formats=("preference", "judged"),
            metrics=PAIR_METRICS,  # and the metrics of the loss
            sample="texts",
            section="preference",
            may_share_rows=True,
            may_be_split=False,
            is_chat=True,
            takes_prompt_adapters=True,
            watches_routers=True,
            has_row_losses=True,
        ),
        TaskEntry(
            name="reward",
            description="score answers, from pairs of them",
            implementation=f"{_PACKAGE}.answer_pairs:RewardTask",
            head="sequence_classification",
            formats=("preference",),
            metrics=PAIR_METRICS,
            sample="texts",
            section="reward",
            may_share_rows=True,
            may_be_split=False,
            is_chat=True,
            watches_routers=True,
            has_row_losses=True,
        ),
        TaskEntry(
            name="distillation",
            description="`sft` from a teacher's probabilities",
            implementation=f"{_PACKAGE}.distillation:DistillationTask",
            head="causal_lm",
            formats=_CHAT_FORMATS,
            metrics=(*TOKEN_METRICS, "cross_entropy", "divergence"),
            section="distillation",
            may_share_rows=True,
            is_chat=True,
            chooses_turns=True,
            generates=True,
            takes_embedding_noise=True,
            watches_routers=True,
        ),
        TaskEntry(
            name="text_classification",
            description="name the class of a text",
            implementation=f"{_PACKAGE}.classification:TextClassificationTask",
            head="sequence_classification",
            formats=("labelled",),
            metrics=("loss", "accuracy", "macro_f1", "micro_f1", "mcc"),  # or of another problem type
            sample="tokens_and_label",
            section="classification",
            may_share_rows=True,
            may_be_split=False,
            takes_embedding_noise=True,
            watches_routers=True,
            smooths_labels=True,
            has_row_losses=True,
        ),
        TaskEntry(
            name="token_classification",
            description="name the class of each word",
            implementation=f"{_PACKAGE}.classification:TokenClassificationTask",
            head="token_classification",
            formats=("tagged", "spans"),
            metrics=("loss", "accuracy", "macro_f1", "entity_f1", "entity_precision", "entity_recall"),
            sample="tokens_and_tags",
            section="classification",
            may_share_rows=True,
            takes_embedding_noise=True,
            watches_routers=True,
            smooths_labels=True,
            has_row_losses=True,
        ),
        TaskEntry(
            name="image_classification",
            description="name the class of an image",
            implementation=f"{_PACKAGE}.classification:ImageClassificationTask",
            head="image_classification",
            formats=("image_label",),
            metrics=("loss", "accuracy", "macro_f1", "top5_accuracy"),
            reads="images",
            sample="image",
            section="classification",
            smooths_labels=True,
        ),
        TaskEntry(
            name="vision_language_sft",
            description="`sft` with images",
            implementation=f"{_PACKAGE}.causal_lm:VisionLanguageSftTask",
            head="image_text_to_text",
            formats=_CHAT_FORMATS,
            metrics=TOKEN_METRICS,
            reads="both",
            is_chat=True,
            chooses_turns=True,
            generates=True,
            has_token_loss=True,
            smooths_labels=True,
        ),
        TaskEntry(
            name="embedding",
            description="a vector for each text",
            implementation=f"{_PACKAGE}.embedding.embedding:EmbeddingTask",
            head="embedding",
            formats=("pairs", "retrieval", "scored_pairs"),
            metrics=("loss", "recall_at_1", "recall_at_5", "recall_at_10", "ndcg_at_10", "mrr_at_10"),
            sample="texts",
            section="embedding",
            may_be_split=False,
            has_row_losses=True,
        ),
        TaskEntry(
            name="reranking",
            description="a score for a query and a passage",
            implementation=f"{_PACKAGE}.embedding.embedding:RerankingTask",
            head="sequence_classification",
            formats=("retrieval", "pairs", "scored_pairs"),
            metrics=("loss", "recall_at_1", "recall_at_5", "recall_at_10", "ndcg_at_10", "mrr_at_10"),
            sample="texts",
            section="reranking",
            may_be_split=False,
            has_row_losses=True,
        ),
    ),
)


def reads_of_head(head: str) -> InputKind:
    """Return the kind of input that a model with this head reads; text for an unknown head."""
    return next((entry.reads for entry in TASKS if entry.head == head), "text")


def tasks_where(fact: str) -> tuple[str, ...]:
    """Return the names of the tasks for which a fact of their entry holds: `tasks_where("is_chat")`."""
    return tuple(entry.name for entry in TASKS if getattr(entry, fact))


@dataclass(frozen=True, kw_only=True)
class MetricEntry(Entry):
    """A metric. One of generated answers has an implementation, others are computed by their task."""

    goal: Literal["minimize", "maximize"] = "maximize"

    @property
    def is_of_answers(self) -> bool:
        """Return whether `evaluate.generate.metrics` can name it: a function of answers and references."""
        return bool(self.implementation)


_MINIMIZED = ("loss", "perplexity", "mse", "cross_entropy", "divergence")
_OF_TASKS = (
    *_MINIMIZED,
    *("token_accuracy", "masked_accuracy", "accuracy", "subset_accuracy", "top5_accuracy", "macro_f1", "micro_f1"),
    *("mcc", "pearson", "spearman", "entity_f1", "entity_precision", "entity_recall"),
    *("preference_accuracy", "reward_margin"),
    *("recall_at_1", "recall_at_5", "recall_at_10", "ndcg_at_10", "mrr_at_10"),
)

METRICS = Table(
    "metric",
    MetricEntry,
    (
        MetricEntry(name="exact_match", implementation="finetune.task.generation:exact_match"),
        *(MetricEntry(name=name, goal="minimize" if name in _MINIMIZED else "maximize") for name in _OF_TASKS),
    ),
)
"""Metrics that are not here, such as a mean reward, can be minimized or maximized."""
