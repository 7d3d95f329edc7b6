"""Tasks on pairs of answers: samples of several sequences, their log-probabilities, sums over pairs; reward models."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from finetune.data.batch import IGNORED, Batch
from finetune.data.encoding.conversation import ConversationEncoder
from finetune.data.encoding.preference import MARGIN, PreferenceEncoder
from finetune.data.features import Features, Outcome
from finetune.data.formats.unlabeled import read_answers_to_score
from finetune.data.rows import Row
from finetune.data.templates.chat_template import require_chat_template
from finetune.data.token_cache.lengths import SampleLengthLimit, SequencesLengthLimit, sequence_bounds
from finetune.errors import DataError
from finetune.task.causal_lm import pad_id
from finetune.task.lm_loss.target_loss import log_probabilities_at_targets
from finetune.task.model_inputs import (
    collate_padded,
    collate_padding_free,
    forward_logits,
    is_padding_free,
    pad_samples,
    sample_logits,
)
from finetune.task.protocol import BaseTask, Predictor, TaskContext

PAIR_WEIGHTS = "pair_weights"
NUM_PAIRS = "num_pairs"


def collate_pairs(features: Sequence[Features], *, pad_id: int | None) -> Batch:
    """Return a batch of the first half of every sample's sequences, followed by the second halves, padded on the right.

    Without `pad_id` the sequences are concatenated into one row in the same order.

    `labels[b, t]` is the token at t + 1 if it is a target. `num_targets` is the number of sequences in the upper half.
    Extras: `num_pairs`, the number of sequences per sample in the upper half, and `pair_weights`, the weight of each of
    them (1, or 0 in a dummy batch).
    """
    upper: list[Features] = []
    lower: list[Features] = []
    num_pairs: list[int] = []
    for sample in features:
        names = ("input_ids", "is_target")
        sequences = [
            Features({name: sample.arrays[name][start:end] for name in names}) for start, end in sequence_bounds(sample)
        ]
        num_pairs.append(len(sequences) // 2)
        upper += sequences[: num_pairs[-1]]
        lower += sequences[num_pairs[-1] :]
    ordered = [*upper, *lower]
    batch = collate_padding_free(ordered) if pad_id is None else collate_padded(ordered, pad_id=pad_id)
    extras = {NUM_PAIRS: torch.tensor(num_pairs), PAIR_WEIGHTS: torch.ones(len(upper))}
    ids = tuple(sample.sample_id for sample in features)
    return replace(batch, num_targets=len(upper), sample_ids=ids, extras=extras)


def join_halves(arrays: Sequence[np.ndarray]) -> Tensor:
    """Return the per-sequence values of all samples in the order of `collate_pairs`, [sequences]."""
    upper = [values[: len(values) // 2] for values in arrays]
    lower = [values[len(values) // 2 :] for values in arrays]
    return torch.from_numpy(np.concatenate([*upper, *lower]))


def split_by_sample(values: Tensor, batch: Batch) -> list[np.ndarray]:
    """Return the per-sequence values of a batch, [sequences], split by sample: the inverse of `join_halves`."""
    num_pairs = batch.extras[NUM_PAIRS].tolist()
    upper, lower = values.detach().chunk(2)
    pairs = zip(torch.split(upper, num_pairs), torch.split(lower, num_pairs), strict=True)
    return [torch.cat(pair).cpu().numpy() for pair in pairs]


def sequence_log_probabilities(model: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probability in nats of every sequence, summed over its targets, in float32: [sequences]."""
    assert batch.targets is not None  # `collate_pairs` sets them
    at_targets = log_probabilities_at_targets(model, batch)  # [targets]
    dense = at_targets.new_zeros(batch.labels.numel()).index_copy(0, batch.targets.positions, at_targets)
    return _by_sequence(dense.view(batch.labels.shape), batch).sum(dim=1)


def num_target_tokens(batch: Batch) -> Tensor:
    """Return the number of targets per sequence, at least 1: [sequences]."""
    return _by_sequence(batch.labels != IGNORED, batch).sum(dim=1).clamp(min=1)


def _by_sequence(values: Tensor, batch: Batch) -> Tensor:
    """Return per-position values by sequence, [sequences, positions], padded with 0."""
    return values if batch.cumulative_lengths is None else pad_samples(values[0], batch)


def select_half(batch: Batch, *, lower: bool) -> Batch:
    """Return the batch without the other half of its sequences; its extras do not change."""
    ends, length = batch.cumulative_lengths, batch.labels.shape[1]
    num_sequences = len(batch.labels) if ends is None else len(batch.lengths)
    start, stop = (num_sequences // 2, num_sequences) if lower else (0, num_sequences // 2)
    lengths = batch.lengths[start:stop]
    first = start * length if ends is None else sum(batch.lengths[:start])
    targets = None if batch.targets is None else batch.targets.rows(start, stop, begin=first)
    if ends is None:
        inputs = {name: tensor[start:stop] for name, tensor in batch.inputs.items()}
        return replace(batch, inputs=inputs, labels=batch.labels[start:stop], targets=targets)
    positions = slice(first, first + sum(lengths))
    return replace(
        batch,
        inputs={name: tensor[:, positions] for name, tensor in batch.inputs.items()},
        labels=batch.labels[:, positions],
        targets=targets,
        cumulative_lengths=ends[start : stop + 1] - first,
        longest=max(lengths, default=0),
        lengths=lengths,
    )


class AnswerPairsTask(BaseTask):
    """Trains on preferred and rejected answers; raises DataError for a tokenizer without a chat template.

    A row is encoded to several sequences of the prompt and one answer; a target of a batch is a pair.
    """

    _encoder: PreferenceEncoder
    _length_limit: SequencesLengthLimit

    def __init__(self, context: TaskContext, *, judged: bool = False, margin: bool = False) -> None:
        require_chat_template(context.tokenizer)
        data = context.data
        self.pad_id = pad_id(context.tokenizer)
        self._batching = data.batching
        encode = ConversationEncoder(
            context.tokenizer,
            system_prompt=data.system_prompt,
            template=data.chat_template,
            allow_special_tokens=data.allow_special_tokens,
            chooses_turns=False,
        )
        name = f"`task.name: {context.section.name}`"
        self._encoder = PreferenceEncoder(encode, name, judged=judged, margin=margin)
        self._length_limit = SequencesLengthLimit(data.longest, data.over_length, data.truncate_side)  # of each answer
        self._identity = {name: True for name, is_used in {"judged": judged, "margin": margin}.items() if is_used}

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return chosen answers followed by rejected ones, padded or concatenated, for one shared forward pass."""
        return collate_pairs(features, pad_id=None if is_padding_free(self._batching) else self.pad_id)

    def dummy_batch(self, features: Features) -> Batch:
        """Return the sample as a batch without weight in the loss."""
        batch = super().dummy_batch(features)
        return replace(batch, extras={**batch.extras, PAIR_WEIGHTS: torch.zeros_like(batch.extras[PAIR_WEIGHTS])})

    def metric_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return the sums of the training loss and the number of pairs."""
        return {**self.loss_sums(model, batch), "num_pairs": batch.extras[PAIR_WEIGHTS].sum()}

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return the means of all sums over the pairs: `loss`, `preference_accuracy` and others; NaN without pairs."""
        num_pairs = sums["num_pairs"] or float("nan")
        names = {name: "loss" if name == "loss_sum" else name for name in sums if name != "num_pairs"}
        return {title: sums[name] / num_pairs for name, title in names.items()}


def pair_sums(losses: Tensor, chosen: Tensor, rejected: Tensor, *, counts: Tensor) -> dict[str, Tensor]:
    """Return the sums over pairs of the losses and, detached, of the rewards, their margins and the accuracy.

    All inputs are [pairs]; `counts` is 1, or 0 for a pair that does not count.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "loss_sum": (losses * counts).sum(),
        "reward_chosen": (chosen * counts).sum(),
        "reward_rejected": (rejected * counts).sum(),
        "reward_margin": ((chosen - rejected) * counts).sum(),
        "preference_accuracy": ((chosen > rejected) * counts).sum(),
    }


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0, centering: float = 0.0) -> Tensor:
    """Return `-log s(r_w - r_l - m) + c (r_w + r_l)^2` of both answers' scores.

    Bradley and Terry, 1952, as in Ouyang et al., 2022, arXiv:2203.02155, equation 1; the margin m is that of Llama 2
    (Touvron et al., 2023, arXiv:2307.09288, equation 2), centering that of Eisenstein et al., 2023, arXiv:2312.09244.
    """
    return -logsigmoid(chosen - rejected - margin) + centering * (chosen + rejected) ** 2


class RewardTask(AnswerPairsTask):
    """Score the chosen answer higher than the rejected one, at the last token before the padding.

    One pair is one target. If end-of-sequence is the padding token, transformers also treats an end-of-sequence token
    at the end of an answer as padding, in training and in inference.
    """

    head = "sequence_classification"

    def __init__(self, context: TaskContext) -> None:
        self.section = context.section.reward
        super().__init__(context, margin=self.section.use_margin)
        # the model finds the last token before the padding by this token when it computes the score
        self.head_values = {"num_labels": 1, "pad_token_id": self.pad_id}

    @property
    def predictor(self) -> Predictor:
        """Return how it scores a conversation: its `score`, or the `scores` of several answers by their columns."""
        limit = SampleLengthLimit(self._length_limit.max_length, "truncate", self._length_limit.truncate_side)
        return Predictor(
            read=read_answers_to_score,
            encode=lambda rows: [self._encode_answers(row) for row in rows],
            collate=lambda features: collate_padded(features, pad_id=self.pad_id),
            outputs=scores,
            prediction=self._prediction,
            limit=limit,
        )

    def _encode_answers(self, row: Row) -> Outcome:
        conversations = row["conversations"].values()
        outcomes = self._encoder.encode(
            [{**row, "messages": turns, "num_context_turns": len(turns) - 1} for turns in conversations]
        )
        answers = tuple(outcome for outcome in outcomes if isinstance(outcome, Features))
        error = next((outcome for outcome in outcomes if isinstance(outcome, DataError)), None)
        return error or (answers if len(answers) == len(outcomes) else None)

    def _prediction(self, row: Row, outputs: Sequence[Tensor]) -> Mapping[str, Any]:
        values = dict(zip(row["conversations"], (output.item() for output in outputs), strict=True))
        return {"score": next(iter(values.values()))} if len(values) == 1 else {"scores": values}

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


def scores(model: nn.Module, batch: Batch) -> Tensor:
    """Return the model's score of each sequence, float32 [sequences]."""
    logits = forward_logits(model, batch) if batch.cumulative_lengths is None else sample_logits(model, batch)
    return logits.squeeze(-1).float()
