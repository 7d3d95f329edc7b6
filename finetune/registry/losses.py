"""The losses that `task.loss` and `loss` of `task.preference`, `.embedding` and `.reranking` choose from.

And `train.loss_kernel`.
"""

from dataclasses import dataclass
from typing import Literal

from finetune.errors import RegistryError
from finetune.registry.table import Entry, Table

Score = Literal["log_probability", "mean_log_probability", "ratio", "mean_ratio"]
"""What a preference loss compares of both answers: the log-probability, or its ratio to the reference model's.

Means are over the tokens of an answer.
"""

TokenScores = Literal["log_probabilities", "logits"]
"""What a loss of tokens is given: the log-probability of each target, or the logits of the whole vocabulary there."""


@dataclass(frozen=True, kw_only=True)
class TokenLossEntry(Entry):
    """A loss of predicted tokens in place of the cross-entropy; plugins add them.

    Its implementation is a function from the scores (log-probabilities [targets], or logits [targets, vocabulary]), the
    labels [targets] and the batch to the loss of each target, [targets].
    """

    scores: TokenScores = "log_probabilities"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.implementation:
            raise RegistryError(f"loss `{self.name}`: has no implementation.")
        if self.scores not in ("log_probabilities", "logits"):
            raise RegistryError(f"loss `{self.name}`: `scores` is `log_probabilities` or `logits`.")


TOKEN_LOSSES: Table[TokenLossEntry] = Table("loss", TokenLossEntry)

PAIRS_TASK = "finetune.task.preference:PreferenceTask"


@dataclass(frozen=True, kw_only=True)
class PreferenceLossEntry(Entry):
    """A loss on pairs of a preferred and another answer.

    Its implementation is a function from the scores of the chosen and of the rejected answers, both [pairs], and the
    section `task.preference` to the loss of each pair; that of a loss with a task of its own is called by that task.
    """

    score: Score
    reads: frozenset[str] = frozenset()  # keys of `task.preference` that not all losses read
    sft_weight: float = 0.0  # of the chosen answer's mean cross-entropy, where none is written
    task: str = PAIRS_TASK  # what trains with it
    formats: tuple[str, ...] = ("preference",)
    metrics: tuple[str, ...] = ("log_probability_chosen", "log_probability_rejected")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.implementation:
            raise RegistryError(f"preference loss `{self.name}`: has no implementation.")
        if self.task == PAIRS_TASK:  # which adds the chosen answer's cross-entropy to every loss
            object.__setattr__(self, "reads", self.reads | {"sft_weight"})

    @property
    def has_reference(self) -> bool:
        """Return whether a frozen reference model scores the answers, too."""
        return self.score in ("ratio", "mean_ratio")


PREFERENCE_LOSSES = Table(
    "preference loss",
    PreferenceLossEntry,
    (
        PreferenceLossEntry(
            name="sigmoid",
            description="DPO (Rafailov et al., 2023, arXiv:2305.18290)",
            implementation="finetune.task.preference:dpo",
            score="ratio",
            reads=frozenset({"label_smoothing"}),
        ),
        PreferenceLossEntry(
            name="hinge",
            description="of ratios (Liu et al., 2023, arXiv:2309.06657)",
            implementation="finetune.task.preference:hinge",
            score="ratio",
        ),
        PreferenceLossEntry(
            name="ipo",
            description="Azar et al., 2023, arXiv:2310.12036",
            implementation="finetune.task.preference:ipo",
            score="mean_ratio",
        ),
        PreferenceLossEntry(
            name="robust",
            description="DPO where some pairs are the wrong way round (Chowdhury et al., 2024, arXiv:2403.00409)",
            implementation="finetune.task.preference:robust_dpo",
            score="ratio",
            reads=frozenset({"label_smoothing"}),
        ),
        PreferenceLossEntry(
            name="orpo",
            description="without a reference (Hong et al., 2024, arXiv:2403.07691)",
            implementation="finetune.task.preference:orpo",
            score="mean_log_probability",
            sft_weight=1.0,
        ),
        PreferenceLossEntry(
            name="simpo",
            description="without a reference (Meng et al., 2024, arXiv:2405.14734)",
            implementation="finetune.task.preference:simpo",
            score="mean_log_probability",
            reads=frozenset({"target_margin"}),
        ),
        PreferenceLossEntry(
            name="kto",
            description="of answers that are judged one by one (Ethayarajh et al., 2024, arXiv:2402.01306)",
            implementation="finetune.task.preference:kto",
            score="ratio",
            reads=frozenset({"desirable_weight", "undesirable_weight"}),
            task="finetune.task.preference:KtoTask",
            formats=("preference", "judged"),
            metrics=("reference_point",),
        ),
        PreferenceLossEntry(
            name="cpo",
            description="without a reference (Xu et al., 2024, arXiv:2401.08417)",
            implementation="finetune.task.preference:dpo",
            score="log_probability",
            reads=frozenset({"label_smoothing"}),
            sft_weight=1.0,
        ),
        PreferenceLossEntry(
            name="apo_zero",
            description="chosen answers become likelier, rejected ones less likely (D'Oosterlinck et al., 2024, "
            "arXiv:2408.06266)",
            implementation="finetune.task.preference:apo_zero",
            score="ratio",
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class PairLossEntry(Entry):
    """A loss on texts that belong together, or that have a score."""

    scores: tuple[float, float] | None = None  # the lowest and the highest score that it accepts; None: it reads none
    is_logit: bool = False  # the model predicts a logit, whose sigmoid is the score
    compares_rows: bool = False  # with all others of the global batch
    reads: frozenset[str] = frozenset()  # keys of `task.embedding` that not all losses read


_ANY_SCORE = (-1e38, 1e38)

EMBEDDING_LOSSES = Table(
    "embedding loss",
    PairLossEntry,
    (
        PairLossEntry(
            name="infonce",
            description="of rows with an anchor and a positive; all passages of the global batch are candidates (van "
            "den Oord et al., 2018, arXiv:1807.03748)",
            implementation="finetune.task.embedding.similarity_losses:InfoNce",
            compares_rows=True,
            reads=frozenset({"symmetric", "temperature"}),
        ),
        PairLossEntry(
            name="cosent",
            description="of scored pairs; compares every two pairs of the global batch (Su, 2022, "
            "https://kexue.fm/archives/8847)",
            implementation="finetune.task.embedding.similarity_losses:Cosent",
            scores=_ANY_SCORE,
            compares_rows=True,
            reads=frozenset({"temperature"}),
        ),
        PairLossEntry(
            name="cosine_mse",
            description="of scored pairs; the squared difference of similarity and score",
            scores=(-1.0, 1.0),
        ),
    ),
)

RERANKING_LOSSES = Table(
    "reranking loss",
    PairLossEntry,
    (
        PairLossEntry(
            name="listwise",
            description="of rows with negatives; the softmax over a row's passages (Gao et al., 2021, "
            "arXiv:2101.08751)",
            implementation="finetune.task.embedding.embedding:listwise",
        ),
        PairLossEntry(
            name="pairwise",
            description="of rows with negatives; the positive against each negative (RankNet; Burges et al., 2005)",
            implementation="finetune.task.embedding.embedding:pairwise",
        ),
        PairLossEntry(
            name="bce",
            description="of scored pairs; the binary cross-entropy with a score from 0 to 1",
            implementation="finetune.task.embedding.embedding:binary_cross_entropy",
            scores=(0.0, 1.0),
            is_logit=True,
        ),
        PairLossEntry(
            name="mse",
            description="of scored pairs; the squared error",
            implementation="finetune.task.embedding.embedding:squared_error",
            scores=_ANY_SCORE,
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class LossKernelEntry(Entry):
    """A way to compute the cross-entropy over tokens. The implementation is that of a package for CUDA GPUs."""

    module: str | None = None  # of that package
    adapts_loss: bool = True  # to label smoothing and z-loss
    takes_bias: bool = True  # of the head


LOSS_KERNELS = Table(
    "loss kernel",
    LossKernelEntry,
    (
        LossKernelEntry(name="auto", description="`chunked`, or `plain` where the logits of a batch are small"),
        LossKernelEntry(
            name="chunked",
            description="at targets only, in chunks, so that the logits of all targets never exist at once",
        ),
        LossKernelEntry(
            name="liger",
            description="by `liger-kernel` (CUDA, extra `kernels`)",
            implementation="finetune.task.lm_loss.target_loss:liger",
            module="liger_kernel.transformers.functional",
            adapts_loss=False,
        ),
        LossKernelEntry(
            name="cce",
            description="by `cut-cross-entropy` (CUDA, extra `kernels`)",
            implementation="finetune.task.lm_loss.target_loss:cce",
            module="cut_cross_entropy",
            adapts_loss=False,
            takes_bias=False,
        ),
        LossKernelEntry(name="plain", description="from the logits of all positions"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class SessionLossEntry(Entry):
    """A loss of tokens that a call of `Session.forward_backward` names.

    Its implementation is a function from the log-probabilities of the targets, their labels, both [targets], and the
    batch to the loss of each target. `columns` are the numbers of the rows' targets that it reads.
    """

    columns: tuple[str, ...] = ()


_POLICY_COLUMNS = ("advantages", "old_log_probabilities")

SESSION_LOSSES = Table(
    "loss",
    SessionLossEntry,
    (
        SessionLossEntry(
            name="cross_entropy",
            description="the negative log-probability",
            implementation="finetune.task.lm_loss.token_loss:cross_entropy",
        ),
        SessionLossEntry(
            name="policy_gradient",
            description="the negative log-probability times the advantage (Williams, 1992)",
            implementation="finetune.task.lm_loss.token_loss:policy_gradient",
            columns=("advantages",),
        ),
        SessionLossEntry(
            name="importance_sampling",
            description="the negative ratio of the probability to that of the sampling model, times the advantage",
            implementation="finetune.task.lm_loss.token_loss:importance_sampling",
            columns=_POLICY_COLUMNS,
        ),
        SessionLossEntry(
            name="clipped_importance_sampling",
            description="the same with the ratio clipped to 0.8 and 1.2 (PPO; Schulman et al., 2017, arXiv:1707.06347)",
            implementation="finetune.task.lm_loss.token_loss:clipped_importance_sampling",
            columns=_POLICY_COLUMNS,
        ),
    ),
)
