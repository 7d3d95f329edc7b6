"""Preference tuning: DPO and variants with a reference model, ORPO, SimPO and CPO without; KTO on single answers.

KTO's paper (Ethayarajh et al., 2024, arXiv:2402.01306) estimates the reference point from a microbatch, so the loss
depends on how the batch is split. Here a pass without gradients over all microbatches of the step on all ranks runs
before the step: the estimate is the paper's over the global batch, and the loss does not depend on the split.
Evaluations estimate it from all validation rows.

The losses are pure functions of log-probabilities, in whatever float type these are. Written for chosen `y_w` and
rejected `y_l` answers to a prompt `x`, `s` being the logistic function. The ratio of an answer is
`log p(y|x) - log p_ref(y|x)`, summed over its tokens; `p` is trained, `p_ref` frozen. Tensors are [pairs].
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from finetune.config.sections.task import PreferenceSection
from finetune.data.batch import Batch
from finetune.data.encoding.preference import IS_GOOD
from finetune.data.features import Features
from finetune.registry.losses import PREFERENCE_LOSSES
from finetune.runtime import distributed
from finetune.task.answer_pairs import (
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
from finetune.task.lm_loss.target_loss import require_one_loss_each
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
        example = {REFERENCE: np.zeros(2, np.float32)}
        return Precomputed("reference log-probabilities", "reference", {}, reference_log_probabilities, example)

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
        require_one_loss_each(losses, scores, name=entry.name, what="pair")
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

    The reference scores the answers, and the mismatched answers (of other prompts).
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


def dpo(chosen: Tensor, rejected: Tensor, section: PreferenceSection) -> Tensor:
    """Return `-(1 - e) log s(beta m) - e log s(-beta m)` of the difference `m` of both ratios.

    DPO: Rafailov et al., 2023, arXiv:2305.18290, equation 7; with label smoothing e it is conservative DPO (Mitchell,
    2023, "A note on DPO with noisy preferences"), with a share e of flipped pairs. Of summed
    log-probabilities instead of ratios, it is CPO's first term (Xu et al., 2024, arXiv:2401.08417, equation 3).
    """
    beta, smoothing, margin = section.beta, section.label_smoothing, chosen - rejected
    return -(1 - smoothing) * logsigmoid(beta * margin) - smoothing * logsigmoid(-beta * margin)


def robust_dpo(chosen: Tensor, rejected: Tensor, section: PreferenceSection) -> Tensor:
    """Return `(-(1 - e) log s(beta m) + e log s(-beta m)) / (1 - 2 e)`, unbiased where a share e is flipped.

    Robust DPO: Chowdhury et al., 2024, arXiv:2403.00409, equation 13.
    """
    beta, smoothing, margin = section.beta, section.label_smoothing, chosen - rejected
    unflipped = -(1 - smoothing) * logsigmoid(beta * margin) + smoothing * logsigmoid(-beta * margin)
    return unflipped / (1 - 2 * smoothing)


def hinge(chosen: Tensor, rejected: Tensor, section: PreferenceSection) -> Tensor:
    """Return `max(0, 1 - beta m)` of the difference `m` of both ratios.

    SLiC as a loss of ratios: Liu et al., 2023, arXiv:2309.06657, equation 10 (norm), beta there gamma.
    """
    return torch.relu(1 - section.beta * (chosen - rejected))


def ipo(chosen: Tensor, rejected: Tensor, section: PreferenceSection) -> Tensor:
    """Return `(m - 1 / (2 tau))^2` of the difference `m` of both ratios, each divided by the tokens of its answer.

    IPO: Azar et al., 2023, arXiv:2310.12036, equation 17, tau here beta. The paper does not mention the division; its
    authors confirmed it to TRL, which divides likewise.
    """
    return (chosen - rejected - 1 / (2 * section.beta)) ** 2


def orpo(chosen: Tensor, rejected: Tensor, section: PreferenceSection) -> Tensor:
    """Return `-lambda log s(log(odds(y_w) / odds(y_l)))`, odds being `p / (1 - p)`, from mean log-probabilities.

    ORPO's second term: Hong et al., 2024, arXiv:2403.07691, equations 4, 6 and 7, lambda here beta.
    """
    return section.beta * -logsigmoid((chosen - rejected) - (log_one_minus_exp(chosen) - log_one_minus_exp(rejected)))


def simpo(chosen: Tensor, rejected: Tensor, section: PreferenceSection) -> Tensor:
    """Return `-log s(beta (c - r) - gamma)` from mean log-probabilities of a token, c and r.

    SimPO: Meng et al., 2024, arXiv:2405.14734, equation 6.
    """
    return -logsigmoid(section.beta * (chosen - rejected) - section.target_margin)


def apo_zero(chosen: Tensor, rejected: Tensor, section: PreferenceSection) -> Tensor:
    """Return `1 - s(beta r_w) + s(beta r_l)` of both ratios: each answer moves by itself, not only their difference.

    APO-zero, for chosen answers that are better than the model's own: D'Oosterlinck et al., 2024, arXiv:2408.06266. The
    1 makes the loss positive, as in TRL.
    """
    return 1 - torch.sigmoid(section.beta * chosen) + torch.sigmoid(section.beta * rejected)


def kto(ratio: Tensor, is_good: Tensor, reference_point: Tensor, section: PreferenceSection) -> Tensor:
    """Return `w_D (1 - s(beta (ratio - z)))` of good answers and `w_U (1 - s(beta (z - ratio)))` of bad ones.

    KTO: Ethayarajh et al., 2024, arXiv:2402.01306, equation 8. All are [answers]; z, a scalar without gradient,
    is how far the model is from its reference: see `reference_point`.
    """
    sign = torch.where(is_good, 1.0, -1.0).to(ratio.dtype)
    weight = torch.where(is_good, section.desirable_weight, section.undesirable_weight).to(ratio.dtype)
    return weight * (1 - torch.sigmoid(section.beta * sign * (ratio - reference_point)))


def reference_point(ratio_sum: Tensor, num_answers: Tensor) -> Tensor:
    """Return `max(0, mean ratio)` of answers that belong to other prompts: KTO's estimate of the divergence, a scalar.

    Ethayarajh et al., 2024, arXiv:2402.01306, section 4.1 (there over a microbatch, here over a whole step).
    """
    return (ratio_sum / num_answers).clamp(min=0)


def log_one_minus_exp(log_probability: Tensor) -> Tensor:
    """Return `log(1 - exp(x))` for x < 0, exact near 0 and far from it, with a finite gradient.

    Maechler, 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    largest = -torch.finfo(log_probability.dtype).tiny
    x = log_probability.clamp(max=largest)
    is_near = x > -math.log(2)
    near = torch.log(-torch.expm1(torch.where(is_near, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(is_near, -1.0, x)))
    return torch.where(is_near, near, far)
