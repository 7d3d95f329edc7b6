"""What all causal language-model tasks share: collation, the summed loss over targets and token metrics."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.errors import DataError
from finetune.task.base import BaseTask
from finetune.task.collate import end_to_end, is_end_to_end, padded
from finetune.task.losses import TokenLoss
from finetune.task.materials import Materials
from finetune.task.metrics import token_metrics
from finetune.task.protocol import ModelHead
from finetune.task.target_loss import TargetLoss


class CausalTask(BaseTask):
    """Predict each target token from the tokens before it.

    Rows become `input_ids` and `is_target`.
    """

    head: ModelHead = "causal_lm"

    def __init__(self, materials: Materials) -> None:
        self.tokenizer: PreTrainedTokenizerBase = materials.tokenizer
        self.data = materials.data
        self.pad_id = pad_id(self.tokenizer)
        self.loss = target_loss(materials)

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the samples padded, or end to end where `data.batching` says so."""
        is_row = is_end_to_end(self.data.batching)
        return end_to_end(features) if is_row else padded(features, pad_id=self.pad_id)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss that is trained, in nats, summed over the targets: a float32 scalar."""
        return self.loss_sums(model, batch)["loss_sum"]

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum` and, where that is smoothed or has a z-loss, the plain `cross_entropy` beside it."""
        return self.loss.sums(model, batch)

    def metric_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum` (the plain cross-entropy), `num_targets` and `num_correct`."""
        return self.loss.measured(model, batch)

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return `loss`, `perplexity` and `token_accuracy`."""
        return token_metrics(sums)


def target_loss(materials: Materials) -> TargetLoss:
    """Return the loss of predicted tokens that the job asks for."""
    section = materials.section
    return TargetLoss(TokenLoss(section.label_smoothing, section.z_loss), materials.loss_kernel)


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that fills up short samples: padding, else end-of-sequence. There it never counts."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise DataError("the tokenizer has neither a padding nor an end-of-sequence token. Give it one of them.")
