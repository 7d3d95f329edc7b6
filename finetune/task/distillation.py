"""Knowledge distillation: train the assistant's turns on the token probabilities of a teacher.

The divergences take log-probabilities over the same categories, [targets, categories], and return [targets].
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from finetune.config.sections.task import DistillationSection
from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.errors import DataError
from finetune.task.causal_lm import SftTask
from finetune.task.lm_loss.head import LmHead, compute_at_targets, logits_at_targets, map_chunks, targets_of
from finetune.task.metrics import perplexity
from finetune.task.protocol import Precomputed, TaskContext


def divergence(teacher: Tensor, student: Tensor, section: DistillationSection) -> Tensor:
    """Return the configured divergence of the teacher's and the student's log-probabilities p and q.

    `forward_kl`: KL(p || q) = sum p (log p - log q) (Hinton et al., 2015, arXiv:1503.02531). `reverse_kl`: KL(q || p)
    (Gu et al., 2023, arXiv:2306.08543). `jsd`: the generalized Jensen-Shannon divergence beta KL(p || m) + (1 - beta)
    KL(q || m) with m = beta p + (1 - beta) q (Agarwal et al., 2023, arXiv:2306.13649, equation 3).
    """
    if section.divergence == "forward_kl":
        return _relative_entropy(teacher, student)
    if section.divergence == "reverse_kl":
        return _relative_entropy(student, teacher)
    beta = section.jsd_beta
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _relative_entropy(teacher, mixture) + (1 - beta) * _relative_entropy(student, mixture)


def reduce_to_top_k(log_probabilities: Tensor, top_k_ids: Tensor) -> Tensor:
    """Return the log-probabilities of the top-k tokens and, last, of all others combined.

    With top-k tokens i1 ... ik it is `log p[i1] ... log p[ik], log sum of p over the others`: a distribution over k + 1
    categories. `top_k_ids` is [targets, k], the result [targets, k + 1].
    """
    others = log_probabilities.scatter(1, top_k_ids, -torch.inf).logsumexp(dim=1, keepdim=True)
    return torch.cat([log_probabilities.gather(1, top_k_ids), others], dim=1)


def _relative_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return sum p (log p - log q); categories with p = 0 contribute 0."""
    terms = log_p.exp() * (log_p - log_q)
    return torch.where(log_p == -torch.inf, 0.0, terms).sum(dim=1)


LOGIT_BYTES = 48
"""Peak bytes of a chunk per student logit, including the backward pass of any divergence."""

TEACHER_TOKENS, TEACHER_LOG_PROBABILITIES = "teacher_tokens", "teacher_log_probabilities"
"""Arrays of a sample: the k most likely tokens at each target, and the k + 1 log-probabilities, target by target."""


class DistillationTask(SftTask):
    """Predict the assistant's turns as a teacher does (Hinton et al., 2015, arXiv:1503.02531).

    With temperature T, weight w of the cross-entropy, and the probabilities p of the teacher and q of the student, both
    a softmax of logits divided by T over the tokenizer's tokens, the loss of a target is
    `(1 - w) T^2 divergence(p, q) + w cross_entropy`. With `top_k`, p and q are reduced by `reduce_to_top_k`.
    """

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        section = context.section.distillation
        assert section is not None  # by config/rules
        self.section = section
        self._num_tokens = len(self.tokenizer)
        self._teacher: nn.Module | None = None
        if section.top_k is not None and section.top_k >= self._num_tokens:
            raise DataError(
                f"task.distillation.top_k: {section.top_k} is not less than the tokenizer's {self._num_tokens} tokens. "
                "Remove it."
            )

    def attach_teacher(self, teacher: nn.Module) -> "DistillationTask":
        """Return the task with a teacher that is not sharded: its forward passes are not collective."""
        task = copy.copy(self)
        task._teacher = teacher
        return task

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_teacher": None}  # loader processes do not need it

    @property
    def precomputed(self) -> Precomputed | None:
        """Return the computation of the teacher's log-probabilities if they are cached."""
        section = self.section
        if not section.cache:
            return None
        identity = {"top_k": section.top_k, "temperature": section.temperature, "tokens": self._num_tokens}
        return Precomputed("teacher's log-probabilities", "teacher", identity, self._teacher_arrays)

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the samples padded, with the cached log-probabilities of the teacher."""
        batch = super().collate(features)
        if any(TEACHER_TOKENS not in sample.arrays for sample in features):
            return batch
        assert self.section.top_k is not None
        cached = {}
        for name, width in ((TEACHER_TOKENS, self.section.top_k), (TEACHER_LOG_PROBABILITIES, self.section.top_k + 1)):
            values = np.concatenate([sample.arrays[name] for sample in features]).reshape(-1, width)
            cached[name] = torch.from_numpy(values.astype(np.int64) if name == TEACHER_TOKENS else values)
        return replace(batch, extras={**batch.extras, **cached})

    def dummy_batch(self, features: Features) -> Batch:
        """Return the sample as a batch without targets and cached log-probabilities."""
        batch = super().dummy_batch(features)
        return replace(batch, extras={name: value[:0] for name, value in batch.extras.items()})

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum` and, detached, the sums of its terms: `cross_entropy` and `divergence`."""
        sums = self.metric_sums(model, batch)
        return {"loss_sum": sums["loss_sum"], **{name: sums[name].detach() for name in ("cross_entropy", "divergence")}}

    def metric_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the sums together with `num_targets` and `num_correct`."""
        labels = targets_of(batch).labels
        teacher_targets: tuple[Tensor, Tensor | None]  # log-probabilities, and the tokens that they are for
        if self.section.cache:
            teacher_targets = batch.extras[TEACHER_LOG_PROBABILITIES], batch.extras[TEACHER_TOKENS]
        else:
            assert self._teacher is not None, "call attach_teacher first"
            teacher_targets = self._score_targets(self._teacher, batch)
        summed = compute_at_targets(
            model, batch, partial(self._sums_of_targets, labels=labels, teacher_targets=teacher_targets)
        )
        sums = dict(zip(("loss_sum", "cross_entropy", "divergence", "num_correct"), summed.unbind(), strict=True))
        return {**sums, "num_targets": torch.full((), len(labels), device=labels.device)}

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return `loss`, its terms `cross_entropy` and `divergence`, `perplexity` and `token_accuracy`."""
        count = sums["num_targets"] or math.nan
        cross_entropy = sums["cross_entropy"] / count
        return {
            "loss": sums["loss_sum"] / count,
            "cross_entropy": cross_entropy,
            "divergence": sums["divergence"] / count,
            "perplexity": perplexity(cross_entropy),
            "token_accuracy": sums["num_correct"] / count,
        }

    def _sums_of_targets(
        self, rows: Tensor, head: LmHead, *, labels: Tensor, teacher_targets: tuple[Tensor, Tensor | None]
    ) -> Tensor:
        """Return the sums over hidden states: loss, cross-entropy, divergence and number correct, [4]."""
        weight, temperature = self.section.cross_entropy_weight, self.section.temperature

        def chunk_sums(rows: Tensor, labels: Tensor, teacher: Tensor, top_k_ids: Tensor | None = None) -> Tensor:
            logits = head.logits(rows)
            student = self._log_probabilities(logits)
            compared = student if top_k_ids is None else reduce_to_top_k(student, top_k_ids)
            divergence_sum = divergence(teacher, compared, self.section).sum()
            cross_entropy = functional.cross_entropy(logits, labels, reduction="sum")
            loss = (1 - weight) * temperature**2 * divergence_sum + weight * cross_entropy
            return torch.stack([loss, cross_entropy, divergence_sum, (logits.argmax(dim=-1) == labels).sum()])

        of_targets = (labels, *(values for values in teacher_targets if values is not None))
        return torch.stack(map_chunks(chunk_sums, head, rows, *of_targets, logit_bytes=LOGIT_BYTES)).sum(dim=0)

    @torch.no_grad()
    def _score_targets(self, teacher: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the teacher's log-probabilities at the targets, and the tokens that they are for, None for all."""
        log_probabilities = self._log_probabilities(logits_at_targets(teacher, batch))
        if self.section.top_k is None:
            return log_probabilities, None
        top_k_ids = log_probabilities.topk(self.section.top_k, dim=1).indices
        return reduce_to_top_k(log_probabilities, top_k_ids), top_k_ids

    def _teacher_arrays(self, teacher: nn.Module, batch: Batch) -> list[dict[str, np.ndarray]]:
        """Return the arrays of each sample with the teacher's log-probabilities."""
        log_probabilities, top_k_ids = self._score_targets(teacher, batch)
        assert top_k_ids is not None  # by config/rules
        counts = list(targets_of(batch).per_row)
        by_sample = zip(torch.split(top_k_ids.cpu(), counts), torch.split(log_probabilities.cpu(), counts), strict=True)
        return [
            {
                TEACHER_TOKENS: tokens.flatten().numpy().astype(np.uint32),
                TEACHER_LOG_PROBABILITIES: values.flatten().numpy(),
            }
            for tokens, values in by_sample
        ]

    def _log_probabilities(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities of the tokenizer's tokens, float32 [targets, tokens], by the logits."""
        of_tokens = logits[:, : self._num_tokens].to(torch.float32)
        return (of_tokens / self.section.temperature).log_softmax(dim=-1)
