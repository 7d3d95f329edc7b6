"""Arguments and results of a session, without torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Rows = Sequence[Mapping[str, Any]]
"""Dictionaries of the columns that the job's rows have, or of `input_ids` and, per token, `weights` and others."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text (of a user's turn, where there is a chat template), tokens, or turns."""

LossFunction = Callable[[Any, Any, Any], Any]
"""From the scores of the targets, their labels, [targets], and the batch to the loss of each target, [targets]."""

Scores = Literal["log_probabilities", "logits"]
"""The shape of a loss function's input: [targets], or [targets, vocabulary]."""


@dataclass(frozen=True)
class JobBatch:
    """The job's own rows of one step, as `session.batches()` yields them."""

    step: int  # that they are for, from 1


@dataclass(frozen=True)
class ForwardBackward:
    """The results of a call of `forward_backward`, over all ranks."""

    loss: float  # the mean over the targets of this call
    loss_sum: float
    num_targets: int
    num_tokens: int
    metrics: Mapping[str, float]  # of the job's task; empty for another loss
    log_probabilities: tuple[tuple[float, ...], ...] = ()  # of the targets of every row; empty with the job's own loss


@dataclass(frozen=True)
class OptimStep:
    """The results of a call of `optim_step`."""

    step: int  # from 1
    loss: float  # the mean over the targets of the step
    num_targets: int
    gradient_norm: float  # before clipping
    learning_rate: float
    was_skipped: bool  # the gradient was not finite, so the weights are as they were


@dataclass(frozen=True)
class Sample:
    """One answer to a prompt."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # the stop token included
    text: str  # without special tokens
    log_probabilities: tuple[float, ...]  # of the tokens, by the model itself: at temperature 1, without top_p
