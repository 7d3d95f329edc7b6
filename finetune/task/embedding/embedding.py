"""Text embedding maps related texts to nearby vectors; reranking scores a query and a passage read together.

The loss of an embedding is that of the global batch (GradCache: Gao et al., 2021, arXiv:2101.06983). A step of several
microbatches runs each of them twice: first without gradients to compute all vectors, then with gradients for its share
of the loss. Both passes draw the same random numbers.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from finetune.data.batch import Batch
from finetune.data.encoding.text import (
    SCORE,
    Contents,
    Prompts,
    TextGroupsEncoder,
    TextsLengthLimit,
    Truncation,
)
from finetune.data.encoding.tokenizer import append_eos
from finetune.data.features import LENGTHS_OF_SEQUENCES, Features
from finetune.data.formats.unlabeled import read_passages_to_rank, read_texts_to_embed
from finetune.data.rows import Row
from finetune.data.token_cache.lengths import sequence_bounds
from finetune.registry.losses import EMBEDDING_LOSSES, RERANKING_LOSSES
from finetune.registry.model_choices import POOLING_MODES
from finetune.runtime.seeds import keep_random_state
from finetune.task.classes import TextPadding
from finetune.task.embedding.similarity_losses import Cosent, InfoNce, LossOfStep, Similarity
from finetune.task.metrics import ranking_metrics, ranks_among, ranks_in, regression_metrics
from finetune.task.model_inputs import forward_inputs, forward_logits
from finetune.task.protocol import BaseTask, EvaluationOutput, Predictor, TaskContext

Pooling = Literal["mean", "cls", "last_token"]

_TEXT_ID_BITS = 52
"""Bits of a text's digest: the number that a float64 represents exactly."""


def collate_groups(features: Sequence[Features], padding: TextPadding) -> Batch:
    """Return all first sequences, then all second ones, then the others sample by sample, padded on the right.

    `group_sizes` are the numbers of sequences per sample, `text_ids` the digests of the sequences. A sample is one
    target; its label is its score, if samples have scores.
    """
    names = [name for name in ("input_ids", "token_type_ids") if name in features[0].arrays]
    groups = [
        [
            Features({name: sample.arrays[name][start:end] for name in names}, sample.sample_id)
            for start, end in sequence_bounds(sample)
        ]
        for sample in features
    ]
    firsts, seconds = [group[0] for group in groups], [group[1] for group in groups if len(group) > 1]
    sequences = [*firsts, *seconds, *(sequence for group in groups for sequence in group[2:])]
    digests = [
        hashlib.blake2b(np.ascontiguousarray(sequence.arrays["input_ids"], np.uint32).tobytes(), digest_size=8).digest()
        for sequence in sequences
    ]
    labels = (
        torch.tensor([float(sample.arrays[SCORE][0]) for sample in features])
        if SCORE in features[0].arrays
        else torch.zeros(len(features), dtype=torch.long)
    )
    return Batch(
        inputs=padding.inputs(sequences),
        labels=labels,
        num_targets=len(features),
        num_tokens=sum(sample.length for sample in features),
        sample_ids=tuple(sample.sample_id for sample in features),
        text_ids=tuple(int.from_bytes(digest, "little") >> (64 - _TEXT_ID_BITS) for digest in digests),
        group_sizes=tuple(len(group) for group in groups),
    )


def pooled_vectors(model: nn.Module, batch: Batch, pooling: Pooling) -> Tensor:
    """Return one vector per sequence, float32 [sequences, dimensions], not normalized."""
    states: Tensor = model(**forward_inputs(model, batch)).last_hidden_state  # [sequences, length, dimensions]
    mask = batch.inputs["attention_mask"]
    if pooling == "mean":
        weights = mask.to(torch.float32)[..., None]
        vectors: Tensor = (states.to(torch.float32) * weights).sum(dim=1) / weights.sum(dim=1)
        return vectors
    if pooling == "cls":
        return states[:, 0].to(torch.float32)
    last = (mask.sum(dim=1) - 1)[:, None, None].expand(-1, 1, states.shape[-1])
    return states.gather(1, last).squeeze(1).to(torch.float32)


GRADIENT, LOSS, MASKED = "cached_gradient", "cached_loss", "cached_masked"
ANCHOR, POSITIVE, NEGATIVE = range(3)

_OTHER_MODES = ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")


class EmbeddingTask(BaseTask):
    """Train embeddings in which related texts are close. One row is one target."""

    head = "embedding"
    _encoder: TextGroupsEncoder

    def __init__(self, context: TaskContext) -> None:
        self.section, self.data = context.section.embedding, context.data
        if self.section.pooling == "last_token":
            append_eos(context.tokenizer)
        self.padding = TextPadding(context.tokenizer)
        self.head_values = self.padding.head_values
        self.similarity = Similarity(self.section.normalize, self.section.matryoshka_dims)
        entry = EMBEDDING_LOSSES[self.section.loss]
        self._is_scored = entry.scores is not None
        self.loss: LossOfStep | None = None  # over all rows of a step; None if every row has its own loss
        if entry.compares_rows:
            self.loss = EMBEDDING_LOSSES.resolve(entry.name)(self.similarity, self.section)
        contents: Contents = "scores" if self._is_scored else "passages"
        prompts = self.section.prompts
        self._encoder = TextGroupsEncoder(
            context.tokenizer,
            contents=contents,
            task="task `embedding`",
            prompts=Prompts(prompts.query, prompts.passage),
            scores=entry.scores,
            cut=Truncation.of(self.data),
            allow_special_tokens=self.data.allow_special_tokens,
        )
        self._length_limit = TextsLengthLimit(self.data.longest, self.data.over_length, self.data.truncate_side)
        self._identity = {"contents": contents, "prompts": [prompts.query, prompts.passage]}

    @property
    def predictor(self) -> Predictor:
        """Return how it computes the vector of each text: `embedding` of a row's only text, else `embeddings`."""
        return Predictor(read_texts_to_embed, self._encoder.of_texts(), self.collate, self._vectors, self._prediction)

    def _vectors(self, model: nn.Module, batch: Batch) -> Tensor:
        vectors = pooled_vectors(model, batch, self.section.pooling)
        return functional.normalize(vectors, dim=-1) if self.section.normalize else vectors

    def _prediction(self, row: Row, outputs: Sequence[Tensor]) -> Mapping[str, Any]:
        if len(outputs) == 1:
            return {"embedding": outputs[0].tolist()}
        vectors = (output.tolist() for output in outputs)
        sizes = {name: None if isinstance(text, str) else len(text) for name, text in row["texts"].items()}
        return {"embeddings": {n: next(vectors) if k is None else list(islice(vectors, k)) for n, k in sizes.items()}}

    def export_files(self, config: Any) -> Mapping[str, Any]:
        """Return the files of sentence-transformers, in version 2, which all versions up to 6 read."""
        prompts = self.section.prompts
        modes = {name: mode == self.section.pooling for mode, name in POOLING_MODES.items()}
        dimension = config.get_text_config().hidden_size
        pooling = {"word_embedding_dimension": dimension, **modes, **dict.fromkeys(_OTHER_MODES, False)}
        names = ["Transformer", "Pooling", *(["Normalize"] if self.section.normalize else [])]
        modules = [
            {
                "idx": number,
                "name": str(number),
                "path": f"{number}_{name}" if number else "",
                "type": f"sentence_transformers.models.{name}",
            }
            for number, name in enumerate(names)
        ]
        return {
            "modules.json": modules,
            "sentence_bert_config.json": {"max_seq_length": self.data.longest, "do_lower_case": False},
            "1_Pooling/config.json": {**pooling, "include_prompt": True},
            "config_sentence_transformers.json": {
                "model_type": "SentenceTransformer",
                "prompts": {"query": prompts.query, "document": prompts.passage, "passage": prompts.passage},
                "default_prompt_name": None,
                "similarity_fn_name": "cosine" if self.section.normalize else "dot",
            },
        }

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return a batch of all anchors, then all positives, then all negatives, padded on the right."""
        return collate_groups(features, self.padding)

    def label_text(self, features: Features) -> str:
        """Return the score, or the lengths of the sample's texts."""
        if SCORE in features.arrays:
            return f"score {features.arrays[SCORE][0]:g}"
        lengths = features.arrays[LENGTHS_OF_SEQUENCES].tolist()
        negatives = f", negatives of {', '.join(map(str, lengths[2:]))}" if lengths[2:] else ""
        return f"anchor of {lengths[0]} tokens, positive of {lengths[1]}{negatives}"

    def prepare_step(self, model: nn.Module, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the batches with the step's loss and the gradients of their vectors. Collective.

        A single microbatch does not need this pass: `loss_sums` computes the same.
        """
        if self.loss is None or len(batches) == 1:
            return batches
        with torch.no_grad(), keep_random_state():
            vectors = torch.cat([pooled_vectors(model, batch, self.section.pooling) for batch in batches])
        step = self.loss(vectors, batches)
        masked = vectors.new_full((), step.num_masked / len(batches))
        losses = torch.split(step.row_losses, [len(batch.group_sizes) for batch in batches])
        gradients = torch.split(step.gradient, [len(batch.text_ids) for batch in batches])
        return [
            replace(batch, extras={**batch.extras, LOSS: loss.sum(), GRADIENT: gradient, MASKED: masked})
            for batch, loss, gradient in zip(batches, losses, gradients, strict=True)
        ]

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the sum of the rows' losses, and the number of passages masked as duplicates.

        Value and gradient are exactly the whole step's. A batch that did not pass through `prepare_step`
        is treated as this rank's only microbatch; the call is then collective.
        """
        vectors = pooled_vectors(model, batch, self.section.pooling)
        if self.loss is None:
            errors = self.similarity.of_pairs(*vectors.chunk(2)) - batch.labels[:, None]
            return {"loss_sum": errors.square().mean(dim=1).sum()}
        if GRADIENT not in batch.extras:
            step = self.loss(vectors.detach(), [batch])
            loss, gradient = step.row_losses.sum(), step.gradient
            masked = vectors.new_full((), step.num_masked)
        else:
            loss, gradient, masked = (batch.extras[name] for name in (LOSS, GRADIENT, MASKED))
        product = (vectors * gradient).sum()
        sums = {"loss_sum": loss + (product - product.detach())}
        return {**sums, "masked_duplicates": masked} if not self._is_scored else sums

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> EvaluationOutput:
        """Return sample id, role, digest and vector per text; for scored pairs, score and similarities."""
        vectors = pooled_vectors(model, batch, self.section.pooling)
        if not batch.sample_ids:
            return EvaluationOutput({})
        ids = torch.tensor(batch.sample_ids, dtype=torch.float64)
        if self._is_scored:
            similarities = self.similarity.of_pairs(*vectors.chunk(2))
            columns = torch.cat([batch.labels[:, None].double(), similarities.double()], dim=1).cpu()
            return EvaluationOutput({}, torch.cat([ids[:, None], columns], dim=1))
        num_negatives = torch.tensor(batch.group_sizes) - 2
        text_sample_ids = torch.cat([ids, ids, ids.repeat_interleave(num_negatives)])
        roles = torch.full((len(text_sample_ids),), float(NEGATIVE), dtype=torch.float64)
        roles[: 2 * len(ids)] = torch.tensor([ANCHOR, POSITIVE], dtype=torch.float64).repeat_interleave(len(ids))
        digests = torch.tensor(batch.text_ids, dtype=torch.float64)
        keys = torch.stack([text_sample_ids, roles, digests], dim=1)
        return EvaluationOutput({}, torch.cat([keys, vectors.to("cpu", torch.float64)], dim=1))

    def row_losses(self, records: Tensor) -> Tensor | None:
        """Return the loss of every row among all of them, [rows]; None for CoSENT, where rows share it."""
        if isinstance(self.loss, InfoNce):
            vectors, ids, num_rows = _sorted_texts(records)
            return self.loss.of_all(vectors, ids, num_rows=num_rows)
        return None if self.loss else (records[:, 2:] - records[:, 1:2]).square().mean(dim=1)

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return `loss`, computed as one step over all rows, and retrieval or regression metrics.

        Retrieval is of every anchor's positives among all distinct positives and negatives.
        """
        assert records is not None, "there are no rows to evaluate on"
        if self._is_scored:
            scores, similarities = records[:, 1], records[:, 2:]
            if isinstance(self.loss, Cosent):
                loss = self.loss.of_similarities(similarities, scores)
            else:
                loss = (similarities - scores[:, None]).square().mean()
            return {"loss": float(loss), **regression_metrics(scores[:, None], similarities[:, :1])}
        losses = self.row_losses(records)
        assert losses is not None, "only CoSENT has none"
        metrics = {"loss": float(losses.mean())}
        vectors, ids, num_rows = _sorted_texts(records)
        # distinct anchors and passages, and the indices of each anchor's positives
        _, queries, query_of_row = np.unique(ids[:num_rows], return_index=True, return_inverse=True)
        _, corpus, index_of_passage = np.unique(ids[num_rows:], return_index=True, return_inverse=True)
        positives: list[set[int]] = [set() for _ in queries]
        for query, passage in zip(query_of_row.tolist(), index_of_passage[:num_rows].tolist(), strict=True):
            positives[query].add(passage)
        relevant = [sorted(passages) for passages in positives]
        chosen = (vectors[torch.from_numpy(queries)], vectors[torch.from_numpy(num_rows + corpus)])
        for number, (anchors, passages) in enumerate(self.similarity.views(*chosen)):
            measured = ranking_metrics(ranks_among(anchors, passages, relevant))
            suffix = f"_dim_{anchors.shape[1]}" if number else ""
            metrics |= {f"{name}{suffix}": value for name, value in measured.items()}
        return metrics


def _sorted_texts(records: Tensor) -> tuple[Tensor, np.ndarray, int]:
    """Return the vectors and digests of all anchors, then positives, then negatives, and the number of rows."""
    roles, order = records[:, 1].sort(stable=True)
    return records[order, 3:].float(), records[order, 2].long().numpy(), int((roles == ANCHOR).sum())


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
