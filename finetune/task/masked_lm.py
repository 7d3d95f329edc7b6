"""Masked-language modelling: predict masked tokens from the tokens on both sides of them.

Which tokens are masked is drawn for each sample alone, so it depends neither on the batch nor on the world size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from finetune.config.sections.task import MaskedLmSection
from finetune.data.batch import IGNORED, Batch, Targets
from finetune.data.encoding.text import MaskedTextEncoder
from finetune.data.encoding.tokenizer import TextTokenizer, num_special_tokens_around
from finetune.data.features import Features
from finetune.data.token_cache.lengths import SampleLengthLimit
from finetune.errors import DataError
from finetune.runtime.seeds import derive_seed
from finetune.task.base import BaseTask
from finetune.task.causal_lm import make_target_loss, pad_id
from finetune.task.metrics import token_metrics
from finetune.task.model_inputs import collate_row, is_padding_free
from finetune.task.protocol import ModelHead, SampleSpec, TaskContext
from finetune.task.row_formats import RequireText


@dataclass(frozen=True)
class TokenMasker:
    """Hides tokens as BERT does (Devlin et al., 2018, arXiv:1810.04805)."""

    section: MaskedLmSection
    mask_id: int
    ordinary_ids: np.ndarray  # the tokens that may stand where one is replaced: all but the special ones

    def __call__(self, features: Features) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that are read and the labels, both int64 [length], drawn from its seed and its id.

        Of the n tokens that may be masked, `fraction * n` are, rounded, and at least one. Of whole words there are
        as many as fit in, the first one drawn in any case.
        """
        draw = np.random.default_rng(derive_seed(features.seed, "hiding", features.sample_id))
        ids = features.arrays["input_ids"].astype(np.int64)
        masked = self._masked_positions(features, draw)
        labels = np.full(len(ids), IGNORED, np.int64)
        labels[masked] = ids[masked]
        drawn = draw.random(len(masked))
        random, kept = self.section.random_fraction, self.section.kept_fraction
        replaced = masked[drawn < random]
        ids[replaced] = draw.choice(self.ordinary_ids, len(replaced))
        ids[masked[drawn >= random + kept]] = self.mask_id
        return ids, labels

    def _masked_positions(self, features: Features, draw: np.random.Generator) -> np.ndarray:
        places = np.flatnonzero(features.arrays["is_target"])
        num_masked = max(1, round(self.section.fraction * len(places)))
        if not self.section.whole_words:
            return np.sort(draw.choice(places, num_masked, replace=False))
        words = np.cumsum(features.arrays["is_word_start"])[places]  # the number of each token's word
        numbers, sizes = np.unique(words, return_counts=True)
        turn = draw.permutation(len(numbers))
        chosen, num_chosen = [turn[0]], int(sizes[turn[0]])
        for each in turn[1:]:
            if num_chosen + sizes[each] <= num_masked:
                chosen.append(each)
                num_chosen += int(sizes[each])
        return places[np.isin(words, numbers[chosen])]


MASK_TOKENS = ("<mask>", "[MASK]")
"""What a mask is called where a tokenizer has one without saying so, such as a token added by the job."""


class MaskedLmTask(BaseTask):
    """Predict masked tokens (Devlin et al., 2018, arXiv:1810.04805); raises DataError for a tokenizer without a mask.

    Which tokens are masked is drawn again in every step; in evaluations it is always the same tokens.
    """

    head: ModelHead = "masked_lm"

    def __init__(self, context: TaskContext) -> None:
        section, self.data = context.section, context.data
        tokenizer = context.tokenizer
        self.pad_id = pad_id(tokenizer)
        self.loss = make_target_loss(context)
        self._section = section.masked_lm
        mask_id = _mask_id(tokenizer)
        special = TextTokenizer(tokenizer).special
        ordinary = np.array([i for i in sorted(tokenizer.get_vocab().values()) if i not in special], np.int64)
        self._mask = TokenMasker(self._section, mask_id, ordinary)
        self._frame = num_special_tokens_around(tokenizer)
        if self.data.longest <= sum(self._frame):
            raise DataError(f"data.max_length: {self.data.longest} leaves no room for text between the special tokens.")
        encode = MaskedTextEncoder(
            tokenizer, words=self._section.whole_words, allow_special_tokens=self.data.allow_special_tokens
        )
        self._encoder = RequireText(encode, task="masked_lm")

    @property
    def samples(self) -> SampleSpec:
        """Return samples of at most `data.max_length` tokens; every part of a text keeps the special tokens."""
        data = self.data
        limit = SampleLengthLimit(data.longest, data.over_length, data.truncate_side, self._frame)
        return replace(super().samples, length_limit=limit, identity={"words": self._section.whole_words})

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the samples padded, or end to end, and masked; labels[b, t] is the masked token at t."""
        if is_padding_free(self.data.batching):
            masked = [self._mask(each) for each in features]
            token_labels = np.concatenate([labels for _, labels in masked])
            return collate_row(features, {"input_ids": [ids for ids, _ in masked]}, token_labels=token_labels)
        longest = max(each.length for each in features)
        input_ids = np.full((len(features), longest), self.pad_id, dtype=np.int64)
        attention_mask = np.zeros((len(features), longest), dtype=np.int64)
        labels = np.full((len(features), longest), IGNORED, dtype=np.int64)
        for place, each in enumerate(features):
            input_ids[place, : each.length], labels[place, : each.length] = self._mask(each)
            attention_mask[place, : each.length] = 1
        targets = Targets.of(labels)
        return Batch(
            inputs={"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(attention_mask)},
            labels=torch.from_numpy(labels),
            num_targets=len(targets.labels),
            num_tokens=int(attention_mask.sum()),
            sample_ids=tuple(each.sample_id for each in features),
            targets=targets,
        )

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum` and, where that is smoothed or has a z-loss, the plain `cross_entropy`."""
        return self.loss.sums(model, batch)

    def metric_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum` (the plain cross-entropy), `num_targets` and `num_correct`."""
        return self.loss.evaluation_sums(model, batch)

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return `loss`, `perplexity` and `masked_accuracy`, over the masked tokens."""
        measured = token_metrics(sums)
        measured["masked_accuracy"] = measured.pop("token_accuracy")
        return measured


def _mask_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that hides; one of the usual names becomes the tokenizer's mask where it has none."""
    if tokenizer.mask_token_id is None:
        vocabulary = tokenizer.get_vocab()
        tokenizer.mask_token = next((name for name in MASK_TOKENS if name in vocabulary), None)
    if tokenizer.mask_token_id is None:
        raise DataError(
            "task.masked_lm: the tokenizer has no mask token to hide words with. Write `model.new_tokens: {special: "
            "['<mask>']}`, or use the tokenizer of a model that was trained so."
        )
    return int(tokenizer.mask_token_id)
