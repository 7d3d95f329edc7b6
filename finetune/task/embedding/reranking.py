"""Reranking scores a query and a passage that are read together (a cross-encoder)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from finetune.data.batch import Batch
from finetune.data.encoding.text import SCORE, TextGroupsEncoder, TextsLengthLimit, Truncation
from finetune.data.features import LENGTHS_OF_SEQUENCES, Features
from finetune.data.formats.unlabeled import read_passages_to_rank
from finetune.data.rows import Row
from finetune.registry.losses import RERANKING_LOSSES
from finetune.task.classes import TextPadding
from finetune.task.embedding.embedding import collate_groups
from finetune.task.metrics import ranking_metrics, ranks_in, regression_metrics
from finetune.task.model_inputs import forward_logits
from finetune.task.protocol import BaseTask, EvaluationOutput, Predictor, TaskContext

GROUP = "group_of_sequence"


class RerankingTask(BaseTask):
    """Score a query's positive passage above the negatives, or predict given scores. One row is one target."""

    head = "sequence_classification"
    _encoder: TextGroupsEncoder

    def __init__(self, context: TaskContext) -> None:
        self.section, self.data = context.section.reranking, context.data
        self.padding = TextPadding(context.tokenizer)
        loss = RERANKING_LOSSES[self.section.loss]
        self._is_scored, self._is_logit = loss.scores is not None, loss.is_logit
        self._activation = f"torch.nn.modules.{'activation.Sigmoid' if loss.is_logit else 'linear.Identity'}"
        activation = {"activation_fn": self._activation}
        self.head_values = {"num_labels": 1, "sentence_transformers": activation, **self.padding.head_values}
        self._encoder = TextGroupsEncoder(
            context.tokenizer,
            contents="scores" if self._is_scored else "passages",
            task="task `reranking`",
            joint=True,
            scores=loss.scores,
            cut=Truncation.of(self.data),
            allow_special_tokens=self.data.allow_special_tokens,
        )

        self._length_limit = TextsLengthLimit(self.data.longest, self.data.over_length, self.data.truncate_side)
        self._identity = {"is_scored": self._is_scored, **({"scores": list(loss.scores)} if loss.scores else {})}

    @property
    def predictor(self) -> Predictor:
        """Return how it scores each passage of a query: the `scores` in order, and their `order`, the best first."""
        return Predictor(
            read=read_passages_to_rank,
            encode=self._encoder.of_texts(),
            collate=self.collate,
            outputs=lambda model, batch: self._activated(_scores(model, batch)),
            prediction=self._prediction,
        )

    def _activated(self, scores: Tensor) -> Tensor:
        return scores.sigmoid() if self._is_logit else scores

    def _prediction(self, row: Row, outputs: Sequence[Tensor]) -> Mapping[str, Any]:
        scores = [output.item() for output in outputs]
        return {"scores": scores, "order": sorted(range(len(scores)), key=lambda index: -scores[index])}

    def export_files(self, config: Any) -> Mapping[str, Any]:
        """Return the files of sentence-transformers' `CrossEncoder`; versions before 6 only read the model's config."""
        text = {"text": {"method": "forward", "method_output_name": "logits"}}
        return {
            "modules.json": [
                {
                    "idx": 0,
                    "name": "0",
                    "path": "",
                    "type": "sentence_transformers.base.modules.transformer.Transformer",
                }
            ],
            "sentence_bert_config.json": {
                "transformer_task": "sequence-classification",
                "modality_config": text,
                "module_output_name": "scores",
                "max_seq_length": self.data.longest,
            },
            "config_sentence_transformers.json": {
                "model_type": "CrossEncoder",
                "activation_fn": self._activation,
                "prompts": {},
                "default_prompt_name": None,
            },
        }

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the pairs of query and positive, then all other pairs sample by sample, padded on the right."""
        batch = collate_groups(features, self.padding)
        num, sizes = len(features), np.array(batch.group_sizes)
        first = np.arange(num)
        second = first[sizes > 1]
        groups = np.concatenate([first, second, np.repeat(first, np.maximum(sizes - 2, 0))])
        return replace(batch, extras={GROUP: torch.from_numpy(groups)})

    def label_text(self, features: Features) -> str:
        """Return the score, or the lengths of the query-passage pairs."""
        if SCORE in features.arrays:
            return f"score {features.arrays[SCORE][0]:g}"
        lengths = features.arrays[LENGTHS_OF_SEQUENCES].tolist()
        others = ", ".join(map(str, lengths[1:]))
        return f"with the positive: {lengths[0]} tokens; with the negatives: {others}"

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the sum of the rows' losses."""
        losses: Tensor = RERANKING_LOSSES.resolve(self.section.loss)(_scores(model, batch), batch)
        return {"loss_sum": losses.sum()}

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> EvaluationOutput:
        """Return the sums, and records: id, score and prediction per row, or id and score per pair, positives first."""
        scores = _scores(model, batch)
        if not batch.sample_ids:
            return EvaluationOutput({})
        ids = torch.tensor(batch.sample_ids, dtype=torch.float64)
        losses: Tensor = RERANKING_LOSSES.resolve(self.section.loss)(scores, batch)
        sums = {"loss_sum": losses.sum(), "num_rows": scores.new_full((), len(ids))}
        if self._is_scored:
            columns = torch.stack([batch.labels, self._activated(scores)], dim=1).to("cpu", torch.float64)
            return EvaluationOutput(sums, torch.cat([ids[:, None], columns], dim=1))
        pair_ids = ids[batch.extras[GROUP].cpu()]
        return EvaluationOutput(sums, torch.stack([pair_ids, scores.to("cpu", torch.float64)], dim=1))

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return `loss` and the regression metrics of the scores, or the ranking metrics within every row."""
        assert records is not None, "there are no rows to evaluate on"
        loss = {"loss": sums["loss_sum"] / sums["num_rows"]}
        if self._is_scored:
            return {**loss, **regression_metrics(records[:, 1:2], records[:, 2:3])}
        _, sizes = torch.unique_consecutive(records[:, 0], return_counts=True)
        # Flipped, the positive comes last, so it does not win ties.
        groups = [scores.flip(0) for scores in torch.split(records[:, 1], sizes.tolist())]
        return {**loss, **ranking_metrics(ranks_in(scores, [len(scores) - 1]) for scores in groups)}


def listwise(scores: Tensor, batch: Batch) -> Tensor:
    """Return the softmax cross-entropy over each row's passages, [rows]."""
    num, groups = len(batch.group_sizes), batch.extras[GROUP]
    positives = scores[:num]
    highest = torch.full_like(positives, -torch.inf).scatter_reduce(0, groups, scores.detach(), "amax")
    total = torch.zeros_like(positives).index_add(0, groups, (scores - highest[groups]).exp())
    return total.log() + highest - positives


def pairwise(scores: Tensor, batch: Batch) -> Tensor:
    """Return the mean logistic loss of the positive against the negatives of each row, [rows]."""
    num, groups = len(batch.group_sizes), batch.extras[GROUP]
    positives = scores[:num]
    losses = functional.softplus(scores[num:] - positives[groups[num:]])
    num_negatives = torch.zeros_like(positives).index_add(0, groups[num:], torch.ones_like(losses))
    return torch.zeros_like(positives).index_add(0, groups[num:], losses) / num_negatives


def binary_cross_entropy(scores: Tensor, batch: Batch) -> Tensor:
    """Return the cross-entropy of each row's score, a logit, with its label from 0 to 1."""
    return functional.binary_cross_entropy_with_logits(scores, batch.labels, reduction="none")


def squared_error(scores: Tensor, batch: Batch) -> Tensor:
    """Return the squared difference of each row's score and label."""
    return (scores - batch.labels).square()


def _scores(model: nn.Module, batch: Batch) -> Tensor:
    """Return the score of every query-passage pair, float32 [sequences]."""
    return forward_logits(model, batch).squeeze(-1).float()
