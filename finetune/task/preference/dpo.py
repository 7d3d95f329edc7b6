"""Preference tuning: DPO and variants with a reference model, ORPO, SimPO and CPO without; KTO on single answers.

KTO's paper (Ethayarajh et al., 2024, arXiv:2402.01306) estimates the reference point from a microbatch, so the loss
depends on how the batch is split. Here a pass without gradients over all microbatches of the step on all ranks runs
before the step: the estimate is the paper's over the global batch, and the loss does not depend on the split.
Evaluations estimate it from all validation rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from finetune.data.batch import Batch
from finetune.data.encoding.preference import IS_GOOD
from finetune.data.features import Features
from finetune.registry.losses import PREFERENCE_LOSSES
from finetune.runtime import distributed
from finetune.task.lm_loss.target_loss import require_one_loss_each
from finetune.task.preference.answer_pairs import (
    NUM_PAIRS,
    PAIR_WEIGHTS,
    AnswerPairsTask,
    join_halves,
    num_target_tokens,
    pair_sums,
    select_half,
    sequence_log_probabilities,
    split_by_sample,
)
from finetune.task.preference.losses import kto, reference_point
from finetune.task.protocol import EvaluationOutput, Precomputed, TaskContext

REFERENCE = "reference"
"""The name of a sample's array with the reference log-probability of every sequence."""


class PreferenceTask(AnswerPairsTask):
    """Train the model to prefer the chosen answer over the rejected one. One pair is one target."""

    def __init__(self, context: TaskContext) -> None:
        self.section = context.section.preference
        super().__init__(context, judged="judged" in PREFERENCE_LOSSES[self.section.loss].formats)

    @property
    def precomputed(self) -> Precomputed | None:
        """Return the computation of the reference's log-probabilities, or None if the loss has no reference model."""
        if not PREFERENCE_LOSSES[self.section.loss].has_reference:
            return None
        return Precomputed("reference log-probabilities", "reference", {}, reference_log_probabilities)

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return chosen answers followed by rejected ones, with their reference log-probabilities if computed."""
        batch = super().collate(features)
        if REFERENCE not in features[0].arrays:
            return batch
        reference = join_halves([sample.arrays[REFERENCE] for sample in features])
        return replace(batch, extras={**batch.extras, REFERENCE: reference})

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the sums over the pairs of loss, rewards, margins, correct preferences and log-probabilities."""
        entry, beta = PREFERENCE_LOSSES[self.section.loss], self.section.beta
        # of the chosen and the rejected answers, each [pairs]
        chosen, rejected = sequence_log_probabilities(model, batch).chunk(2)
        num_tokens, scores = num_target_tokens(batch).chunk(2), [chosen, rejected]
        if entry.has_reference:
            chosen_reference, rejected_reference = batch.extras[REFERENCE].chunk(2)
            scores = [chosen - chosen_reference, rejected - rejected_reference]
        # implicit rewards are the compared scores times beta; IPO's are not divided by the number of tokens
        rewards = [beta * score for score in scores]
        if entry.score == "mean_log_probability":
            rewards = [reward / num for reward, num in zip(rewards, num_tokens, strict=True)]
        if entry.score in ("mean_log_probability", "mean_ratio"):
            scores = [score / num for score, num in zip(scores, num_tokens, strict=True)]
        losses: Tensor = PREFERENCE_LOSSES.resolve(entry.name)(*scores, self.section)
        require_one_loss_each(losses, len(chosen), name=entry.name, what="pair")
        sft_weight = entry.sft_weight if self.section.sft_weight is None else self.section.sft_weight
        if sft_weight != 0:
            losses = losses - sft_weight * chosen / num_tokens[0]
        counts = batch.extras[PAIR_WEIGHTS]
        return {
            **pair_sums(losses, *rewards, counts=counts),
            "log_probability_chosen": (chosen.detach() * counts).sum(),
            "log_probability_rejected": (rejected.detach() * counts).sum(),
        }


def reference_log_probabilities(model: nn.Module, batch: Batch) -> Sequence[Mapping[str, np.ndarray]]:
    """Return the model's log-probabilities of the sequences, by sample."""
    return [{REFERENCE: values} for values in split_by_sample(sequence_log_probabilities(model, batch), batch)]


REFERENCE_POINT = "reference_point"


class KtoTask(PreferenceTask):
    """Make good answers more likely and bad ones less likely. One judged answer is one target; a pair has two.

    The reference's log-probabilities are those of the answers, and of the mismatched answers (of other prompts).
    """

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the prompts with their answers, followed by the prompts with mismatched answers."""
        batch = super().collate(features)
        is_good = torch.from_numpy(np.concatenate([sample.arrays[IS_GOOD] for sample in features]))
        return replace(batch, extras={**batch.extras, IS_GOOD: is_good})

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the batches with the reference point of the step, from a pass without gradients. Collective."""
        was_training = model.training
        model.eval()
        sums = []  # of the mismatched answers' log-ratios, and their number
        with torch.no_grad():
            for batch in batches:
                mismatched = sequence_log_probabilities(model, select_half(batch, lower=True))
                ratio = mismatched - batch.extras[REFERENCE].chunk(2)[1]
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
        answers = select_half(batch, lower=False)
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
