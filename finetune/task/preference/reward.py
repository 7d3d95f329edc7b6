"""Reward modeling: scores of answers, trained on pairs with a preferred answer (Bradley-Terry)."""

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
from finetune.task.model_inputs import forward_logits, sample_logits
from finetune.task.preference.answer_pairs import PAIR_WEIGHTS, AnswerPairsTask, pair_metrics, pair_sums
from finetune.task.preference.losses import bradley_terry
from finetune.task.protocol import DataFacts, ModelHead, TaskContext


class RewardTask(AnswerPairsTask):
    """Score the chosen answer higher than the rejected one, at the last token before the padding.

    One pair is one target. If end-of-sequence is the padding token, transformers also treats an end-of-sequence token
    at the end of an answer as padding, in training and in inference.
    """

    head: ModelHead = "sequence_classification"

    def __init__(self, context: TaskContext) -> None:
        self.section = context.section.reward
        super().__init__(context, margin=self.section.use_margin)
        self._lines = _score_lines(self, context.tokenizer)

    @property
    def data_facts(self) -> DataFacts:
        """Return a line about the token at which the score is computed."""
        return DataFacts(lines=self._lines)

    @property
    def head_values(self) -> Mapping[str, Any]:
        """Return the number of scores, and the padding token, by which the model finds the last other token."""
        return {"num_labels": 1, "pad_token_id": self.pad_id}

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return chosen answers followed by rejected ones, with the margins if they are used."""
        batch = super().collate(features)
        if not self.section.use_margin:
            return batch
        margins = torch.from_numpy(np.concatenate([sample.arrays[MARGIN] for sample in features]))
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
    """Return a line about the token at which a conversation is scored; empty if the template cannot render one."""
    (outcome,) = task.encode([_SAMPLE])
    if not isinstance(outcome, Features):
        return ()
    start, end = next(sequence_bounds(outcome))
    ids = outcome.arrays["input_ids"][start:end].tolist()
    while len(ids) > 1 and ids[-1] == task.pad_id:  # treated as padding by the model
        ids.pop()
    before, last = (repr(tokenizer.decode([token])) for token in (ids[-2:] if len(ids) > 1 else ids * 2))
    return (f"reward: a conversation is scored at its last token, {last} (token {ids[-1]}) after {before}",)
