"""Preference tuning: DPO and variants with a reference model, ORPO, SimPO and CPO without; KTO on single answers.

KTO's paper (Ethayarajh et al., 2024, arXiv:2402.01306) estimates the reference point from a microbatch, so the loss
depends on how the batch is split. Here a pass without gradients over all microbatches of the step on all ranks runs
before the step: the estimate is the paper's over the global batch, and the loss does not depend on the split.
Evaluations estimate it from all validation rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config.sections.task import PreferenceSection
from finetune.data.batch import Batch
from finetune.data.encoding.preference import IS_GOOD
from finetune.data.features import Features
from finetune.registry.losses import PREFERENCE_LOSSES, Score
from finetune.runtime import distributed
from finetune.task.lm_loss.target_loss import require_one_loss_each
from finetune.task.preference.answer_pairs import (
    NUM_PAIRS,
    PAIR_WEIGHTS,
    AnswerPairsTask,
    join_halves,
    lower_half,
    num_target_tokens,
    pair_sums,
    sequence_log_probabilities,
    split_by_sample,
    upper_half,
)
from finetune.task.preference.losses import kto, reference_point
from finetune.task.protocol import EvaluationOutput, Precomputed, TaskContext

REFERENCE = "reference"
"""The name of a sample's array with the reference log-probability of every sequence."""


class PreferenceTask(AnswerPairsTask):
    """Train the model to prefer the chosen answer over the rejected one. One pair is one target."""

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


REFERENCE_POINT = "reference_point"


class KtoTask(AnswerPairsTask):
    """Make good answers more likely and bad ones less likely. One judged answer is one target; a pair has two."""

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context, judged=True)
        self.section = context.section.preference

    @property
    def precomputed(self) -> Precomputed | None:
        """Return the reference's log-probabilities of the answers, and of the mismatched answers (of other prompts)."""
        return precomputed_reference()

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the prompts with their answers, followed by the prompts with mismatched answers."""
        batch = super().collate(features)
        is_good = torch.from_numpy(np.concatenate([sample.arrays[IS_GOOD] for sample in features]))
        return attach_reference(replace(batch, extras={**batch.extras, IS_GOOD: is_good}), features)

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the batches with the reference point of the step, from a pass without gradients. Collective."""
        was_training = model.training
        model.eval()
        sums = []  # of the mismatched answers' log-ratios, and their number
        with torch.no_grad():
            for batch in batches:
                ratio = sequence_log_probabilities(model, lower_half(batch)) - batch.extras[REFERENCE].chunk(2)[1]
                counts = batch.extras[PAIR_WEIGHTS]
                sums.append(torch.stack([(ratio * counts).sum(), counts.sum()]))
        model.train(was_training)
        ratio_sum, num_answers = distributed.sum_tensor(torch.stack(sums).sum(dim=0))
        point = reference_point(ratio_sum, num_answers)
        return [replace(batch, extras={**batch.extras, REFERENCE_POINT: point}) for batch in batches]

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return loss and reference point, summed over answers, and rewards and counts of good and bad answers.

        A batch that did not pass through `prepare_step` is treated as the whole step; the call is then collective.
        """
        if REFERENCE_POINT not in batch.extras:
            (batch,) = self.prepare_step(model, [batch])
        answers = upper_half(batch)
        log_probability = sequence_log_probabilities(model, answers)
        ratio = log_probability - batch.extras[REFERENCE].chunk(2)[0]
        counts, is_good, point = batch.extras[PAIR_WEIGHTS], batch.extras[IS_GOOD], batch.extras[REFERENCE_POINT]
        good, bad = counts * is_good, counts * ~is_good
        reward = self.section.beta * ratio.detach()
        return {
            "loss_sum": (kto(ratio, is_good, point, self.section) * counts).sum(),
            "reference_point": point * counts.sum(),
            "num_good": good.sum(),
            "num_bad": bad.sum(),
            "reward_chosen": (reward * good).sum(),
            "reward_rejected": (reward * bad).sum(),
            "log_probability_chosen": (log_probability.detach() * good).sum(),
            "log_probability_rejected": (log_probability.detach() * bad).sum(),
        }

    def step_metrics(self, sums: Mapping[str, float], *, num_targets: int) -> Mapping[str, float]:
        """Return the means over the good answers, over the bad ones, and their difference."""
        if not num_targets:
            return {}
        good, bad = sums["num_good"] or float("nan"), sums["num_bad"] or float("nan")
        means = {name: value / good for name, value in sums.items() if name.endswith("_chosen")}
        means |= {name: value / bad for name, value in sums.items() if name.endswith("_rejected")}
        margin = means["reward_chosen"] - means["reward_rejected"]
        return {"reference_point": sums["reference_point"] / num_targets, **means, "reward_margin": margin}

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> EvaluationOutput:
        """Return sample id, goodness, log-ratio and the mismatched answer's log-ratio of every answer."""
        ratio = sequence_log_probabilities(model, batch) - batch.extras[REFERENCE]
        own, other = ratio.double().chunk(2)
        ids = torch.tensor(batch.sample_ids, dtype=torch.float64)
        if not len(ids):
            return EvaluationOutput({}, ids.new_zeros(0, 4))
        answer_ids = ids.repeat_interleave(batch.extras[NUM_PAIRS].cpu())
        columns = torch.stack([batch.extras[IS_GOOD].double(), own, other]).cpu()
        return EvaluationOutput({}, torch.stack([answer_ids, *columns], dim=1))

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return `loss`, `reference_point`, the rewards and `preference_accuracy`.

        The latter is the area under the ROC curve of the rewards: the fraction of good-bad pairs in which the good
        answer has the higher reward. NaN without good or without bad answers.
        """
        assert records is not None, "there are no rows to evaluate on"
        is_good, ratio, others = records[:, 1].bool(), records[:, 2], records[:, 3]
        point = reference_point(others.sum(), torch.tensor(len(others)))
        reward = self.section.beta * ratio
        good, bad = reward[is_good], reward[~is_good]
        values = {
            "loss": kto(ratio, is_good, point, self.section).mean(),
            "reference_point": point,
            "reward_chosen": good.mean(),
            "reward_rejected": bad.mean(),
            "reward_margin": good.mean() - bad.mean(),
            "preference_accuracy": win_rate(good, bad),
        }
        return {name: float(value) for name, value in values.items()}


def win_rate(good: Tensor, bad: Tensor) -> Tensor:
    """Return the fraction of good-bad pairs in which the good value is higher, ties count half; NaN without pairs."""
    ordered = bad.sort().values
    wins = torch.searchsorted(ordered, good) + torch.searchsorted(ordered, good, right=True)
    return wins.double().sum() / (2 * len(good) * len(bad)) if len(good) and len(bad) else torch.tensor(torch.nan)
