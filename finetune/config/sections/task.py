"""`task:` - what is learnt from a row."""

from typing import Annotated, Literal

from pydantic import Field

from finetune.config.section import MAX_FACTOR, Factor, Fraction, Length, NameOrPath, Positive, Section, Strings, key

TaskName = Literal[
    "sft",
    "pretrain",
    "seq2seq",
    "masked_lm",
    "preference",
    "reward",
    "distillation",
    "text_classification",
    "token_classification",
    "image_classification",
    "vision_language_sft",
]

Weights = Annotated[tuple[Factor, ...], Field(strict=False)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class ClassificationSection(Section):
    """The classes of a text, of its words or of an image."""

    kind: Literal["single_label", "multi_label", "regression"] = key(
        "Exactly one class, any number of them, or a number (several, where `label` is a list of numbers).",
        "single_label",
    )
    labels: Strings = key(
        "Names of the classes in the order of the model's outputs; unset, those of the training rows, sorted.", ()
    )
    class_weights: Literal["balanced"] | Weights | None = key(
        "Weight of each class in the loss, in the order of `labels`; `balanced`: inverse to how often it occurs.", None
    )


class PreferenceSection(Section):
    """Learning from answers of which one is preferred."""

    loss: Literal["sigmoid", "hinge", "ipo", "robust", "orpo", "simpo", "kto", "cpo"] = key(
        "DPO with a `sigmoid` (Rafailov et al., 2023, arXiv:2305.18290), `hinge` (Liu et al., 2023, arXiv:2309.06657), "
        "`ipo` (Azar et al., 2023, arXiv:2310.12036) or `robust` (Chowdhury et al., 2024, arXiv:2403.00409) loss; "
        "`kto` (Ethayarajh et al., 2024, arXiv:2402.01306); without a reference `orpo` (Hong et al., 2024, "
        "arXiv:2403.07691), `simpo` (Meng et al., 2024, arXiv:2405.14734) and `cpo` (Xu et al., 2024, "
        "arXiv:2401.08417).",
        "sigmoid",
    )
    beta: float = key("Scale of the log-probability ratios; ORPO's lambda, IPO's tau.", 0.1, gt=0.0, le=MAX_FACTOR)
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = key(
        "Share of the pairs whose preference is assumed to be the wrong way round.", 0.0
    )
    target_margin: float = key("SimPO's gamma: by how much the chosen answer is to win.", 0.5, ge=0.0, le=MAX_FACTOR)
    sft_weight: float | None = key(
        "Weight of the chosen answer's own cross-entropy, the mean over its tokens, beside the loss; unset, 1 for "
        "`orpo` and `cpo`, of which it is a part, else 0.",
        None,
        ge=0.0,
        le=MAX_FACTOR,
    )
    desirable_weight: float = key("KTO: weight of the answers that are good.", 1.0, gt=0.0, le=MAX_FACTOR)
    undesirable_weight: float = key("KTO: weight of the answers that are bad.", 1.0, gt=0.0, le=MAX_FACTOR)


class RewardSection(Section):
    """A reward model (Bradley-Terry): the score of an answer."""

    use_margin: bool = key("Subtract the row's `margin` from the difference of the scores (Llama 2's loss).", False)
    centering: float = key(
        "Weight of the squared sum of both scores, which keeps them around 0.", 0.0, ge=0.0, le=MAX_FACTOR
    )


class DistillationSection(Section):
    """A causal model learns from the probabilities of a teacher (Hinton et al., 2015, arXiv:1503.02531)."""

    teacher: NameOrPath = key("Hub name, or a folder when it begins with `.`, `/` or `~`. Its tokenizer must be equal.")
    teacher_dtype: Literal["float32", "bfloat16", "float16"] = key("Type in which the teacher is held.", "float32")
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = key(
        "From the teacher, from the student, or the generalised Jensen-Shannon divergence (Agarwal et al., 2023, "
        "arXiv:2306.13649).",
        "forward_kl",
    )
    jsd_beta: float = key("Weight of the teacher in the mixture of `jsd`.", 0.5, gt=0.0, lt=1.0)
    temperature: float = key(
        "By which both models' logits are divided; the loss is multiplied by its square.", 1.0, gt=0, le=MAX_FACTOR
    )
    cross_entropy_weight: Fraction = key("Share of the ordinary cross-entropy in the loss.", 0.0)
    top_k: Positive | None = key(
        "Keep only the teacher's so many likeliest tokens, the rest as one; unset, the whole vocabulary.", None
    )
    cache: bool = key("Ask the teacher once for every training sample and keep its answers; needs `top_k`.", False)


class Seq2SeqSection(Section):
    """An encoder reads the source, a decoder learns to write the target."""

    max_target_length: Length | None = key("Longest target in tokens; unset, `data.max_length`.", None, ge=2)
    source_prefix: str = key("Text before every source, such as T5's `summarize: `.", "")


class MaskedLmSection(Section):
    """Words are hidden and predicted from both sides (Devlin et al., 2018, arXiv:1810.04805)."""

    fraction: float = key("Share of the tokens that are predicted, drawn anew in every epoch.", 0.15, gt=0.0, lt=1.0)
    random_fraction: Fraction = key("Of these, replaced by a random token instead of the mask.", 0.1)
    kept_fraction: Fraction = key("Of these, left as they are.", 0.1)
    whole_words: bool = key("Hide all tokens of a word together.", False)


class TaskSection(Section):
    """What is learnt from a row."""

    name: TaskName = key(
        "`sft`: predict the assistant's turns, end-of-turn included. `pretrain`: predict every token of a text. "
        "`seq2seq`: an encoder-decoder writes the answer. `masked_lm`: predict hidden tokens. `preference`, `reward`: "
        "from pairs of answers. `distillation`: `sft` from a teacher's probabilities. `text_classification`, "
        "`token_classification`, `image_classification`: name the class. `vision_language_sft`: `sft` with images."
    )
    label_smoothing: Share = key(
        "Share of the probability that is spread evenly over all classes or tokens (Szegedy et al., 2015, "
        "arXiv:1512.00567).",
        0.0,
    )
    z_loss: float = key(
        "Weight of the squared logarithm of the softmax's denominator beside the cross-entropy (Chowdhery et al., "
        "2022, arXiv:2204.02311).",
        0.0,
        ge=0.0,
        le=MAX_FACTOR,
    )
    classification: ClassificationSection = key(
        "The classes, of the three tasks of classification.", ClassificationSection()
    )
    preference: PreferenceSection = key("How pairs of answers are learnt from.", PreferenceSection())
    reward: RewardSection = key("How answers are scored.", RewardSection())
    distillation: DistillationSection | None = key("Who is learnt from, and how.", None)
    seq2seq: Seq2SeqSection = key("Sources and targets.", Seq2SeqSection())
    masked_lm: MaskedLmSection = key("What is hidden.", MaskedLmSection())
