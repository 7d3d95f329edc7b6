"""`task:` - what the model is trained to do with a row."""

from typing import Annotated, Literal

from pydantic import Field

from finetune.config.section import (
    MAX_FACTOR,
    Factor,
    Fraction,
    Length,
    NameOrPath,
    OneOf,
    Positive,
    Section,
    Strings,
    Width,
    key,
)
from finetune.registry.losses import EMBEDDING_LOSSES, PREFERENCE_LOSSES, RERANKING_LOSSES, TOKEN_LOSSES
from finetune.registry.tasks import TASKS

TaskName = Annotated[str, OneOf(TASKS)]
TokenLossName = Annotated[str, OneOf(TOKEN_LOSSES)]
PreferenceLoss = Annotated[str, OneOf(PREFERENCE_LOSSES)]
EmbeddingLoss = Annotated[str, OneOf(EMBEDDING_LOSSES)]
RerankingLoss = Annotated[str, OneOf(RERANKING_LOSSES)]

Weights = Annotated[tuple[Factor, ...], Field(strict=False)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class ClassificationSection(Section):
    """The classes of a text, of its words or of an image."""

    kind: Literal["single_label", "multi_label", "regression"] = key(
        "Exactly one class, any number of classes, or a number (several where `label` is a list of numbers).",
        "single_label",
    )
    labels: Strings = key(
        "Names of the classes in the order of the model's outputs; unset, the classes of the training rows, sorted.", ()
    )
    class_weights: Literal["balanced"] | Weights | None = key(
        "Weight of each class in the loss, in the order of `labels`; `balanced`: inverse class frequency.", None
    )


class PreferenceSection(Section):
    """Training on preferences between answers."""

    loss: PreferenceLoss = key(PREFERENCE_LOSSES.describe(), "sigmoid")
    beta: float = key("Scale of the log-probability ratios; ORPO's lambda, IPO's tau.", 0.1, gt=0.0, le=MAX_FACTOR)
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = key(
        "Fraction of the pairs whose preference is assumed to be wrong.", 0.0
    )
    target_margin: float = key(
        "SimPO's gamma: target margin of the chosen answer's reward.", 0.5, ge=0.0, le=MAX_FACTOR
    )
    sft_weight: float | None = key(
        "Weight of the chosen answer's mean cross-entropy, which is added to the loss; unset, 1 for `orpo` and `cpo`, "
        "whose losses include it, else 0.",
        None,
        ge=0.0,
        le=MAX_FACTOR,
    )
    desirable_weight: float = key("KTO: weight of the desirable answers.", 1.0, gt=0.0, le=MAX_FACTOR)
    undesirable_weight: float = key("KTO: weight of the undesirable answers.", 1.0, gt=0.0, le=MAX_FACTOR)


class RewardSection(Section):
    """A reward model (Bradley-Terry): the score of an answer."""

    use_margin: bool = key("Subtract the row's `margin` from the difference of the scores (Llama 2's loss).", False)
    centering: float = key(
        "Weight of the squared sum of both scores, which centers them at 0.", 0.0, ge=0.0, le=MAX_FACTOR
    )


class DistillationSection(Section):
    """Train a causal model on the token probabilities of a teacher (Hinton et al., 2015, arXiv:1503.02531)."""

    teacher: NameOrPath = key(
        "Hub name, or a folder when it begins with `.`, `/` or `~`. It must use the student's tokenizer."
    )
    teacher_dtype: Literal["float32", "bfloat16", "float16"] = key("Dtype of the teacher's weights.", "float32")
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = key(
        "KL divergence with the teacher first or the student first, or the generalized Jensen-Shannon divergence "
        "(Agarwal et al., 2023, arXiv:2306.13649).",
        "forward_kl",
    )
    jsd_beta: float = key("Weight of the teacher in the mixture of `jsd`.", 0.5, gt=0.0, lt=1.0)
    temperature: float = key(
        "Temperature that divides both models' logits; the loss is multiplied by its square.", 1.0, gt=0, le=MAX_FACTOR
    )
    cross_entropy_weight: Fraction = key(
        "Weight of the ordinary cross-entropy in the loss; the divergence has the rest.", 0.0
    )
    top_k: Positive | None = key(
        "Use the teacher's k most likely tokens, all others as one; unset, the whole vocabulary.", None
    )
    cache: bool = key(
        "Compute the teacher's probabilities once for every training sample and cache them; needs `top_k`.", False
    )


class Seq2SeqSection(Section):
    """An encoder reads the source, and a decoder is trained to write the target."""

    max_target_length: Length | None = key("Longest target in tokens; unset, `data.max_length`.", None, ge=2)
    source_prefix: str = key("Text before every source, such as T5's `summarize: `.", "")


class MaskedLmSection(Section):
    """Tokens are masked and predicted from both sides (Devlin et al., 2018, arXiv:1810.04805)."""

    fraction: float = key("Fraction of the tokens that are predicted, redrawn in every epoch.", 0.15, gt=0.0, lt=1.0)
    random_fraction: Fraction = key(
        "Of these, the fraction that is replaced by a random token instead of the mask.", 0.1
    )
    kept_fraction: Fraction = key("Of these, the fraction that is left unchanged.", 0.1)
    whole_words: bool = key("Mask all tokens of a word together.", False)


class PromptsSection(Section):
    """Texts that are put before the texts to embed, as E5 and others ask for them."""

    query: str = key("Text before every anchor or query, and before the first text of a scored pair.", "")
    passage: str = key("Text before every positive and negative, and before the second text of a scored pair.", "")


Dimensions = Annotated[tuple[Width, ...], Field(strict=False)]


class EmbeddingSection(Section):
    """One vector for each text. The loss is that of the whole global batch, however it is cut."""

    loss: EmbeddingLoss = key(EMBEDDING_LOSSES.describe(), "infonce")
    temperature: float = key(
        "Divides the similarities in the softmax of `infonce`, and their differences in `cosent`.",
        0.05,
        gt=0.0,
        le=MAX_FACTOR,
    )
    symmetric: bool = key(
        "Of `infonce`, the mean of two losses: find the positive of each anchor, and the anchor of each positive.",
        False,
    )
    matryoshka_dims: Dimensions = key(
        "Also train the first N numbers of each vector as a vector of its own (Kusupati et al., 2022, "
        "arXiv:2205.13147): the mean of the losses at these sizes, such as `[384, 128, 64]`.",
        (),
    )
    pooling: Literal["mean", "cls", "last_token"] = key(
        "The vector of a text: the mean over its tokens, its first token, or its last one, which is end-of-sequence "
        "(for decoders).",
        "mean",
    )
    normalize: bool = key("Scale vectors to length 1: similarities are cosines. Off, they are dot products.", True)
    prompts: PromptsSection = key("Texts before the texts to embed; exported with the model.", PromptsSection())


class RerankingSection(Section):
    """One score for a query and a passage that are read together (a cross-encoder)."""

    loss: RerankingLoss = key(RERANKING_LOSSES.describe(), "listwise")


class TaskSection(Section):
    """What the model is trained to do with a row."""

    name: TaskName = key(TASKS.describe())
    loss: TokenLossName | None = key(
        "A loss of predicted tokens that a plugin adds instead of the cross-entropy; see docs/how-to/plugins.md.",
        None,
    )
    label_smoothing: Share = key(
        "Fraction of the probability that is spread evenly over all classes or tokens (Szegedy et al., 2015, "
        "arXiv:1512.00567).",
        0.0,
    )
    z_loss: float = key(
        "Weight of the squared log of the softmax's denominator, which is added to the cross-entropy (Chowdhery et "
        "al., 2022, arXiv:2204.02311).",
        0.0,
        ge=0.0,
        le=MAX_FACTOR,
    )
    classification: ClassificationSection = key(
        "The classes of the three classification tasks.", ClassificationSection()
    )
    preference: PreferenceSection = key("Losses on preferences between answers.", PreferenceSection())
    reward: RewardSection = key("How answers are scored.", RewardSection())
    distillation: DistillationSection | None = key("The teacher, and the divergence from it.", None)
    seq2seq: Seq2SeqSection = key("Sources and targets.", Seq2SeqSection())
    masked_lm: MaskedLmSection = key("Which tokens are masked.", MaskedLmSection())
    embedding: EmbeddingSection = key("Vectors of texts, and the loss on their similarities.", EmbeddingSection())
    reranking: RerankingSection = key("The loss on the scores of queries and passages.", RerankingSection())
