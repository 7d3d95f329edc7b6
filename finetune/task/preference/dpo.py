"""Preference tuning on pairs of answers: DPO and variants with a reference model; ORPO, SimPO and CPO without."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, nn

from finetune.config.sections.task import PreferenceSection
from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.registry.losses import PREFERENCE_LOSSES, Score
from finetune.task.lm_loss.target_loss import require_one_loss_each
from finetune.task.preference.answer_pairs import (
    PAIR_WEIGHTS,
    AnswerPairsTask,
    join_halves,
    num_target_tokens,
    pair_metrics,
    pair_sums,
    sequence_log_probabilities,
    split_by_sample,
)
from finetune.task.protocol import ModelHead, Precomputed, TaskContext

REFERENCE = "reference"
"""The name of a sample's array with the reference log-probability of every sequence."""


class PreferenceTask(AnswerPairsTask):
    """Train the model to prefer the chosen answer over the rejected one. One pair is one target."""

    head: ModelHead = "causal_lm"

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        self.section = context.section.preference

    @property
    def precomputed(self) -> Precomputed | None:
        """Return the computation of reference log-probabilities, or None if the loss has no reference model."""
        return precomputed_reference() if PREFERENCE_LOSSES[self.section.loss].has_reference else None

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return chosen answers followed by rejected ones, with their reference log-probabilities."""
        return attach_reference(super().collate(features), features)

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the sums over the pairs of loss, rewards, margins, correct preferences and log-probabilities."""
        pairs = PairLogProbabilities.of(sequence_log_probabilities(model, batch), batch)
        rewards = pairs.rewards(self.section)
        counts = batch.extras[PAIR_WEIGHTS]
        return {
            **pair_sums(pairs.losses(self.section), *rewards, counts=counts),
            "log_probability_chosen": (pairs.chosen.detach() * counts).sum(),
            "log_probability_rejected": (pairs.rejected.detach() * counts).sum(),
        }

    def metric_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the same sums and the number of pairs."""
        return {**self.loss_sums(model, batch), "num_pairs": batch.extras[PAIR_WEIGHTS].sum()}

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return the means over the pairs: `loss`, `preference_accuracy`, rewards and log-probabilities."""
        return pair_metrics(sums)


@dataclass(frozen=True)
class PairLogProbabilities:
    """Log-probabilities and token counts of a batch's answers, all [pairs]."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    chosen_reference: Tensor | None = None
    rejected_reference: Tensor | None = None

    @classmethod
    def of(cls, log_probability: Tensor, batch: Batch) -> "PairLogProbabilities":
        """Return the pairs of a batch whose sequences have these log-probabilities, [sequences]."""
        reference = batch.extras.get(REFERENCE)
        chosen, rejected = log_probability.chunk(2)
        chosen_reference, rejected_reference = (None, None) if reference is None else reference.chunk(2)
        chosen_tokens, rejected_tokens = num_target_tokens(batch).chunk(2)
        return cls(chosen, rejected, chosen_tokens, rejected_tokens, chosen_reference, rejected_reference)

    def losses(self, section: PreferenceSection) -> Tensor:
        """Return the loss of every pair, [pairs]."""
        entry = PREFERENCE_LOSSES[section.loss]
        preferred: Tensor = PREFERENCE_LOSSES.resolve(entry.name)(*self._scores(entry.score), section)
        require_one_loss_each(preferred, len(self.chosen), name=entry.name, what="pair")
        weight = entry.sft_weight if section.sft_weight is None else section.sft_weight
        return preferred if weight == 0 else preferred - weight * self.chosen / self.chosen_tokens

    def rewards(self, section: PreferenceSection) -> tuple[Tensor, Tensor]:
        """Return the implicit rewards of chosen and rejected answers: beta times the scores that the loss compares."""
        score = PREFERENCE_LOSSES[section.loss].score
        if score == "mean_log_probability":
            return section.beta * self.chosen / self.chosen_tokens, section.beta * self.rejected / self.rejected_tokens
        chosen, rejected = self._scores("ratio" if score == "mean_ratio" else score)
        return section.beta * chosen, section.beta * rejected

    def _scores(self, score: Score) -> tuple[Tensor, Tensor]:
        """Return the scores of the chosen and rejected answers that a loss compares."""
        if score == "log_probability":
            return self.chosen, self.rejected
        if score == "mean_log_probability":
            return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens
        assert self.chosen_reference is not None and self.rejected_reference is not None, "the reference is precomputed"
        chosen, rejected = self.chosen - self.chosen_reference, self.rejected - self.rejected_reference
        if score == "ratio":
            return chosen, rejected
        return chosen / self.chosen_tokens, rejected / self.rejected_tokens


def precomputed_reference() -> Precomputed:
    """Return the computation of the reference model's log-probabilities of a sample's sequences."""
    return Precomputed("reference log-probabilities", "reference", {}, reference_log_probabilities)


def reference_log_probabilities(model: nn.Module, batch: Batch) -> Sequence[Mapping[str, np.ndarray]]:
    """Return the model's log-probabilities of the sequences, by sample."""
    return [{REFERENCE: values} for values in split_by_sample(sequence_log_probabilities(model, batch), batch)]


def attach_reference(batch: Batch, features: Sequence[Features]) -> Batch:
    """Return the batch with the sequences' reference log-probabilities, if they have been computed."""
    if REFERENCE not in features[0].arrays:
        return batch
    reference = join_halves([sample.arrays[REFERENCE] for sample in features])
    return replace(batch, extras={**batch.extras, REFERENCE: reference})
