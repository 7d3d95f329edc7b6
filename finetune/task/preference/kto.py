"""KTO (Ethayarajh et al., 2024, arXiv:2402.01306): single good or bad answers against a reference point.

The paper estimates the reference point from a microbatch, so the loss depends on how the batch is split. Here a pass
without gradients over all microbatches of the step on all ranks runs before the step: the estimate is the paper's over
the global batch, and the loss does not depend on the split. Evaluations estimate it from all validation rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from finetune.data.batch import Batch
from finetune.data.encoding.preference import IS_GOOD
from finetune.data.features import Features
from finetune.runtime import distributed
from finetune.task.preference.answer_pairs import (
    NUM_PAIRS,
    PAIR_WEIGHTS,
    AnswerPairsTask,
    lower_half,
    sequence_log_probabilities,
    upper_half,
)
from finetune.task.preference.dpo import REFERENCE, attach_reference, precomputed_reference
from finetune.task.preference.losses import kto, reference_point
from finetune.task.protocol import EvaluationOutput, ModelHead, Precomputed, TaskContext

REFERENCE_POINT = "reference_point"


class KtoTask(AnswerPairsTask):
    """Make good answers more likely and bad ones less likely. One judged answer is one target; a pair has two."""

    head: ModelHead = "causal_lm"

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
        with torch.no_grad():
            sums = torch.stack([_ratio_sums(model, batch) for batch in batches]).sum(dim=0)
        model.train(was_training)
        ratio_sum, num_answers = distributed.sum_tensor(sums)
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
            "loss_sum": (self._losses(ratio, is_good, point) * counts).sum(),
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
            "loss": self._losses(ratio, is_good, point).mean(),
            "reference_point": point,
            "reward_chosen": good.mean(),
            "reward_rejected": bad.mean(),
            "reward_margin": good.mean() - bad.mean(),
            "preference_accuracy": win_rate(good, bad),
        }
        return {name: float(value) for name, value in values.items()}

    def _losses(self, ratio: Tensor, is_good: Tensor, point: Tensor) -> Tensor:
        section = self.section
        return kto(
            ratio,
            is_good,
            point,
            beta=section.beta,
            desirable_weight=section.desirable_weight,
            undesirable_weight=section.undesirable_weight,
        )


def win_rate(good: Tensor, bad: Tensor) -> Tensor:
    """Return the fraction of good-bad pairs in which the good value is higher, ties count half; NaN without pairs."""
    ordered = bad.sort().values
    wins = torch.searchsorted(ordered, good) + torch.searchsorted(ordered, good, right=True)
    return wins.double().sum() / (2 * len(good) * len(bad)) if len(good) and len(bad) else torch.tensor(torch.nan)


def _ratio_sums(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum of the mismatched answers' log-ratios and their number: [2]."""
    ratio = sequence_log_probabilities(model, lower_half(batch)) - batch.extras[REFERENCE].chunk(2)[1]
    counts = batch.extras[PAIR_WEIGHTS]
    return torch.stack([(ratio * counts).sum(), counts.sum()])
