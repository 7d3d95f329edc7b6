"""Reward modeling: a score for an answer, trained on pairs of which one is preferred (Bradley-Terry)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.data.batch import Batch
from finetune.data.encoding.preference import MARGIN
from finetune.data.features import Features
from finetune.data.token_cache.lengths import sequence_bounds
from finetune.task.model_inputs import forward_logits
from finetune.task.pooling import sample_logits
from finetune.task.preference.answer_pairs import PAIR_WEIGHTS, AnswerPairsTask, pair_metrics, pair_sums
from finetune.task.preference.losses import bradley_terry
from finetune.task.protocol import DataFacts, ModelHead, TaskContext


class RewardTask(AnswerPairsTask):
    """Score the chosen answer higher than the rejected one, from the last token that is no padding.

    One pair is one target. Where padding is done with the end-of-sequence token, transformers takes such a token at
    the end of an answer for padding too, in training as afterwards.
    """

    head: ModelHead = "sequence_classification"

    def __init__(self, context: TaskContext) -> None:
        self.section = context.section.reward
        super().__init__(context, margin=self.section.use_margin)
        self._lines = _score_lines(self, context.tokenizer)

    @property
    def data_facts(self) -> DataFacts:
        """Return at which token the score is read."""
        return DataFacts(lines=self._lines)

    @property
    def head_values(self) -> Mapping[str, Any]:
        """Return that there is one score, and which token is padding: the model looks for the last other one."""
        return {"num_labels": 1, "pad_token_id": self.pad_id}

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return chosen answers and below them rejected ones, with the margins where they are used."""
        batch = super().collate(features)
        if not self.section.use_margin:
            return batch
        margins = torch.from_numpy(np.concatenate([each.arrays[MARGIN] for each in features]))
        return replace(batch, extras={**batch.extras, MARGIN: margins})

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the sums over the pairs of loss, scores, margins and correct preferences."""
        chosen, rejected = scores(model, batch).chunk(2)
        margin = batch.extras[MARGIN] if self.section.use_margin else 0.0
        losses = bradley_terry(chosen, rejected, margin=margin, centering=self.section.centering)
        return pair_sums(losses, chosen, rejected, counts=batch.extras[PAIR_WEIGHTS])

    def metric_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the same sums and the number of pairs."""
        return {**self.loss_sums(model, batch), "num_pairs": batch.extras[PAIR_WEIGHTS].sum()}

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return the means over the pairs: `loss`, `preference_accuracy`, both scores and their difference."""
        return pair_metrics(sums)


def scores(model: nn.Module, batch: Batch) -> Tensor:
    """Return the model's score of each sequence, float32 [sequences]."""
    logits = forward_logits(model, batch) if batch.cumulative_lengths is None else sample_logits(model, batch)
    return logits.squeeze(-1).float()


_SAMPLE = {
    "prompt": [{"role": "user", "content": "a"}],
    "chosen": [{"role": "assistant", "content": "b"}],
    "rejected": [{"role": "assistant", "content": "c"}],
    MARGIN: 0.0,
}


def _score_lines(task: RewardTask, tokenizer: Any) -> tuple[str, ...]:
    """Return a line on the token at which the score of a conversation is read; none where a turn cannot be rendered."""
    (outcome,) = task.encode([_SAMPLE])
    if not isinstance(outcome, Features):
        return ()
    start, end = next(sequence_bounds(outcome))
    ids = outcome.arrays["input_ids"][start:end].tolist()
    while len(ids) > 1 and ids[-1] == task.pad_id:  # taken for padding by the model
        ids.pop()
    before, last = (repr(tokenizer.decode([token])) for token in (ids[-2:] if len(ids) > 1 else ids * 2))
    return (f"reward: the score is read at the last token of a conversation: {last} (token {ids[-1]}) after {before}",)
