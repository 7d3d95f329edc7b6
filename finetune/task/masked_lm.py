"""Masked language modeling: predict masked tokens from the tokens on both sides.

Masked positions are drawn per sample, so they depend neither on the batch nor on the world size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from finetune.config.sections.task import MaskedLmSection
from finetune.data.batch import IGNORED, Batch, Targets
from finetune.data.encoding.text import MaskedTextEncoder
from finetune.data.encoding.tokenizer import TextTokenizer, num_special_tokens_around
from finetune.data.features import Features
from finetune.data.token_cache.lengths import SampleLengthLimit
from finetune.errors import DataError
from finetune.runtime.seeds import derive_seed
from finetune.task.causal_lm import TokenTask
from finetune.task.metrics import token_metrics
from finetune.task.model_inputs import collate_row, is_padding_free
from finetune.task.protocol import RequireText, TaskContext


@dataclass(frozen=True)
class TokenMasker:
    """Masks tokens as BERT does (Devlin et al., 2018, arXiv:1810.04805)."""

    section: MaskedLmSection
    mask_id: int
    ordinary_ids: np.ndarray  # random replacement tokens: all but the special ones

    def __call__(self, features: Features) -> tuple[np.ndarray, np.ndarray]:
        """Return the masked input ids and the labels, both int64 [length], drawn from the sample's seed and id.

        Of n maskable tokens, `fraction * n` are masked, rounded, and at least one. With whole words, words are drawn
        until no other fits into that number; the first one is always masked.
        """
        draw = np.random.default_rng(derive_seed(features.seed, "hiding", features.sample_id))
        ids = features.arrays["input_ids"].astype(np.int64)
        positions = np.flatnonzero(features.arrays["is_target"])
        num_masked = max(1, round(self.section.fraction * len(positions)))
        if self.section.whole_words:
            words = np.cumsum(features.arrays["is_word_start"])[positions]  # the word number of every token
            numbers, sizes = np.unique(words, return_counts=True)
            order = draw.permutation(len(numbers))
            chosen, num_chosen = [order[0]], int(sizes[order[0]])
            for word in order[1:]:
                if num_chosen + sizes[word] <= num_masked:
                    chosen.append(word)
                    num_chosen += int(sizes[word])
            masked = positions[np.isin(words, numbers[chosen])]
        else:
            masked = np.sort(draw.choice(positions, num_masked, replace=False))
        labels = np.full(len(ids), IGNORED, np.int64)
        labels[masked] = ids[masked]
        drawn = draw.random(len(masked))
        random_fraction, kept_fraction = self.section.random_fraction, self.section.kept_fraction
        replaced = masked[drawn < random_fraction]
        ids[replaced] = draw.choice(self.ordinary_ids, len(replaced))
        ids[masked[drawn >= random_fraction + kept_fraction]] = self.mask_id
        return ids, labels


MASK_TOKENS = ("<mask>", "[MASK]")
"""Names of the mask token in tokenizers that do not declare it, such as a token added by the job."""


class MaskedLmTask(TokenTask):
    """Predict masked tokens (Devlin et al., 2018, arXiv:1810.04805); raises DataError without a mask token.

    Masked positions are redrawn at every step; evaluations always mask the same ones.
    """

    head = "masked_lm"

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        section, data, tokenizer = context.section.masked_lm, self.data, self.tokenizer
        if tokenizer.mask_token_id is None:
            vocabulary = tokenizer.get_vocab()
            tokenizer.mask_token = next((name for name in MASK_TOKENS if name in vocabulary), None)
        if tokenizer.mask_token_id is None:
            raise DataError(
                "task.masked_lm: the tokenizer has no mask token. Write `model.new_tokens: {special: ['<mask>']}`, or "
                "use the tokenizer of a masked language model."
            )
        special = TextTokenizer(tokenizer).special
        ordinary = np.array([i for i in sorted(tokenizer.get_vocab().values()) if i not in special], np.int64)
        self._mask = TokenMasker(section, int(tokenizer.mask_token_id), ordinary)
        frame = num_special_tokens_around(tokenizer)  # around every part of a split text
        if data.longest <= sum(frame):
            raise DataError(f"data.max_length: {data.longest} leaves no room for text between the special tokens.")
        encode = MaskedTextEncoder(tokenizer, words=section.whole_words, allow_special_tokens=data.allow_special_tokens)
        self._encoder = RequireText(encode, task="masked_lm")
        self._length_limit = SampleLengthLimit(data.longest, data.over_length, data.truncate_side, frame)
        self._identity = {"words": section.whole_words}

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the masked samples, padded or concatenated; labels[b, t] is the original token at a masked t."""
        if is_padding_free(self.data.batching):
            masked = [self._mask(sample) for sample in features]
            token_labels = np.concatenate([labels for _, labels in masked])
            return collate_row(features, {"input_ids": [ids for ids, _ in masked]}, token_labels=token_labels)
        longest = max(sample.length for sample in features)
        input_ids = np.full((len(features), longest), self.pad_id, dtype=np.int64)
        attention_mask = np.zeros((len(features), longest), dtype=np.int64)
        labels = np.full((len(features), longest), IGNORED, dtype=np.int64)
        for row, sample in enumerate(features):
            input_ids[row, : sample.length], labels[row, : sample.length] = self._mask(sample)
            attention_mask[row, : sample.length] = 1
        targets = Targets.of(labels)
        return Batch(
            inputs={"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(attention_mask)},
            labels=torch.from_numpy(labels),
            num_targets=len(targets.labels),
            num_tokens=int(attention_mask.sum()),
            sample_ids=tuple(sample.sample_id for sample in features),
            targets=targets,
        )

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return `loss`, `perplexity` and `masked_accuracy`, over the masked tokens."""
        measured = token_metrics(sums)
        measured["masked_accuracy"] = measured.pop("token_accuracy")
        return measured
