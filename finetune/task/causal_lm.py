"""Causal language models: continued pre-training on every token, and supervised fine-tuning on assistant turns."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from finetune.data.batch import Batch
from finetune.data.encoding.conversation import ConversationEncoder
from finetune.data.encoding.text import TextEncoder
from finetune.data.features import Features
from finetune.data.templates.chat_template import require_chat_template
from finetune.data.token_cache.chunks import Encode
from finetune.errors import DataError
from finetune.task.base import BaseTask, RequireMessages, RequireText
from finetune.task.lm_loss.target_loss import PluginLoss, TargetLoss
from finetune.task.lm_loss.token_loss import TokenLoss
from finetune.task.metrics import token_metrics
from finetune.task.model_inputs import collate_padded, collate_padding_free, is_padding_free
from finetune.task.protocol import GenerationPrompt, ModelHead, TaskContext


class CausalTask(BaseTask):
    """Predict each target token from the tokens before it.

    Rows become `input_ids` and `is_target`.
    """

    head: ModelHead = "causal_lm"

    def __init__(self, context: TaskContext) -> None:
        self.tokenizer: PreTrainedTokenizerBase = context.tokenizer
        self.data = context.data
        self.pad_id = pad_id(self.tokenizer)
        self.loss = make_target_loss(context)

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the samples padded, or concatenated if `data.batching` is padding-free."""
        is_row = is_padding_free(self.data.batching)
        return collate_padding_free(features) if is_row else collate_padded(features, pad_id=self.pad_id)

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum` and, with label smoothing or z-loss, the plain `cross_entropy`."""
        return self.loss.sums(model, batch)

    def metric_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum` (the plain cross-entropy), `num_targets` and `num_correct`."""
        return self.loss.evaluation_sums(model, batch)

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return `loss`, `perplexity` and `token_accuracy`."""
        return token_metrics(sums)


def make_target_loss(context: TaskContext) -> TargetLoss:
    """Return the configured loss of predicted tokens."""
    section = context.section
    if section.loss is not None:
        return PluginLoss(TokenLoss(), context.loss_kernel, section.loss)
    return TargetLoss(TokenLoss(section.label_smoothing, section.z_loss), context.loss_kernel)


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the padding token, or else the end-of-sequence token; padding is never a target."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise DataError("the tokenizer has neither a padding nor an end-of-sequence token. Add one of them.")


class PretrainTask(CausalTask):
    """Predict every token of the text except the first, end-of-sequence included."""

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        self._encoder = RequireText(TextEncoder(self.tokenizer, allow_special_tokens=context.data.allow_special_tokens))


class SftTask(CausalTask):
    """Predict the assistant's turns, end-of-turn included; raises DataError for a tokenizer without chat template."""

    def __init__(self, context: TaskContext) -> None:
        require_chat_template(context.tokenizer)
        super().__init__(context)
        self._encoder = self._make_encoder()

    def _make_encoder(self) -> Encode:
        data = self.data
        encode = ConversationEncoder(
            self.tokenizer,
            train_on=data.train_on,
            system_prompt=data.system_prompt,
            template=data.chat_template,
            allow_special_tokens=data.allow_special_tokens,
            train_on_reasoning=data.train_on_reasoning,
        )
        return RequireMessages(encode)

    def prompt(self, features: Features) -> GenerationPrompt | None:
        """Return all tokens before the last answer, and that answer with its end-of-turn token."""
        is_target = features.arrays["is_target"]
        end = int(np.flatnonzero(is_target)[-1]) + 1
        before = np.flatnonzero(~is_target[:end])
        start = int(before[-1]) + 1
        ids = features.arrays["input_ids"].tolist()
        return GenerationPrompt(input_ids=tuple(ids[:start]), reference_ids=tuple(ids[start:end]))
