"""The loss of one call: the job's own, or a function of the targets' log-probabilities or logits."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from finetune.data.batch import Batch
from finetune.errors import DataError, UserError
from finetune.registry.losses import SESSION_LOSSES, TOKEN_LOSSES
from finetune.run.session.results import LossFunction, Scores
from finetune.run.session.rows import WEIGHTS
from finetune.task.lm_loss.head import logits_at_targets
from finetune.task.lm_loss.target_loss import log_probabilities_at_targets
from finetune.train.parts import StepTask


@dataclass(frozen=True)
class JobLoss:
    """The job's own loss; a microbatch that only accompanies those of other ranks counts for nothing."""

    task: StepTask

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the task's results for them. Collective."""
        return self.task.prepare_step(model, batches)

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the task's sums."""
        sums = self.task.loss_sums(model, batch)
        return sums if batch.sample_ids else {name: value * 0.0 for name, value in sums.items()}

    def step_metrics(self, sums: Mapping[str, Any], *, num_targets: int) -> Mapping[str, float]:
        """Return the task's metrics."""
        return self.task.step_metrics(sums, num_targets=num_targets)


@dataclass(frozen=True)
class TargetLosses:
    """A loss per target, times the target's weight; the log-probabilities are kept for the caller."""

    loss: LossFunction
    scores: Scores = "log_probabilities"
    log_probabilities: list[Tensor] = field(default_factory=list)  # of every microbatch, detached

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the batches as they are."""
        return batches

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the weighted sum; raises UserError where the function does not return one number per target."""
        assert batch.targets is not None, "a causal language model's batch has targets"
        labels = batch.targets.labels
        if self.scores == "logits":
            scores = logits_at_targets(model, batch).float()
            log_probabilities = scores.detach().log_softmax(dim=-1).gather(-1, labels[:, None])[:, 0]
        else:
            scores = log_probabilities_at_targets(model, batch)
            log_probabilities = scores.detach()
        self.log_probabilities.append(log_probabilities)
        losses: Any = self.loss(scores, labels, batch)
        if not isinstance(losses, torch.Tensor) or losses.shape != labels.shape:
            returned = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise UserError(
                f"loss `{loss_name(self.loss)}` returned {returned}, and {len(labels)} targets need "
                f"({len(labels)},): one loss per target. The mean is taken later, over the targets of the whole step."
            )
        weights = batch.extras.get(WEIGHTS)
        loss_sum = (losses if weights is None else losses * weights).sum()
        return {"loss_sum": loss_sum if batch.sample_ids else loss_sum * 0.0}

    def step_metrics(self, sums: Mapping[str, Any], *, num_targets: int) -> Mapping[str, float]:
        """Return no metrics."""
        return {}


def resolve_loss(loss: str | LossFunction, scores: Scores, *, columns: Collection[str]) -> "TargetLosses":
    """Return the loss of that name, a plugin's too, or the function, which is given these scores.

    Raises RegistryError for an unknown name, DataError where the rows lack a column that the loss reads.
    """
    if not isinstance(loss, str):
        if not callable(loss):
            raise UserError(f"loss: must be a name or a function, and is a {type(loss).__name__}.")
        if scores not in ("log_probabilities", "logits"):
            raise UserError(f"scores: must be `log_probabilities` or `logits`, and is `{scores}`.")
        return TargetLosses(loss, scores)
    if loss in TOKEN_LOSSES:
        return TargetLosses(TOKEN_LOSSES.resolve(loss), TOKEN_LOSSES[loss].scores)
    entry = SESSION_LOSSES[loss]
    if missing := [name for name in entry.columns if name not in columns]:
        raise DataError(f"loss `{loss}` reads `{missing[0]}` of every row, and these have none.")
    return TargetLosses(SESSION_LOSSES.resolve(loss))


def loss_name(loss: object) -> str:
    """Return the name of a loss for messages and comparisons."""
    return loss if isinstance(loss, str) else str(getattr(loss, "__qualname__", type(loss).__qualname__))
