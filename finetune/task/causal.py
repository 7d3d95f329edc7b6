"""What all causal language-model tasks share: collation, the summed loss over targets and token metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from finetune.config.sections.data import DataSection
from finetune.data.batch import IGNORED, Batch
from finetune.data.encoding.encode import attempted
from finetune.data.features import Features, Outcome
from finetune.data.prepared.chunks import Encode
from finetune.errors import DataError
from finetune.task.collate import end_to_end, is_end_to_end, padded
from finetune.task.forward import logits_of
from finetune.task.losses import cross_entropy_sum
from finetune.task.metrics import token_metrics, token_sums
from finetune.task.protocol import ModelHead, Prompt, Row


class CausalTask:
    """Predict each target token from the tokens before it."""

    head: ModelHead = "causal_lm"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataSection) -> None:
        self.tokenizer = tokenizer
        self.data = data
        self.pad_id = pad_id(tokenizer)

    @property
    def encoder(self) -> Encode:
        """Return what `encode` does as something that other processes can be sent; by default the task itself."""
        return self.encode

    def encode(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return each row as `input_ids` and `is_target`, None where nothing is to be learnt, or what is wrong."""
        return [attempted(self.encode_row, row) for row in rows]

    def encode_row(self, row: Row) -> Features | None:
        """Return what becomes of one row; raises its DataError. A task defines this or `encode`, which is faster."""
        (outcome,) = self.encode([row])
        if isinstance(outcome, DataError):
            raise outcome
        return outcome

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the samples padded, or end to end where `data.batching` says so."""
        is_row = is_end_to_end(self.data.batching)
        return end_to_end(features) if is_row else padded(features, pad_id=self.pad_id)

    def filler(self, features: Features) -> Batch:
        """Return the sample as a batch in which nothing counts."""
        batch = self.collate([features])
        return replace(batch, labels=torch.full_like(batch.labels, IGNORED), num_targets=0, num_tokens=0, sample_ids=())

    def count_targets(self, batch: Batch) -> int:
        """Return the number of targets, known since collation."""
        return batch.num_targets

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy in nats summed over the targets, a float32 scalar."""
        return cross_entropy_sum(logits_of(model, batch), batch.labels)

    def metric_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum`, `num_targets` and `num_correct`."""
        return token_sums(logits_of(model, batch), batch.labels)

    def metrics(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Return `loss`, `perplexity` and `token_accuracy`."""
        return token_metrics(sums)

    def prompt(self, features: Features) -> Prompt | None:
        """Return None: plain text asks nothing."""
        return None


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that fills up short samples: padding, else end-of-sequence. There it never counts."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise DataError("the tokenizer has neither a padding nor an end-of-sequence token. Give it one of them.")
