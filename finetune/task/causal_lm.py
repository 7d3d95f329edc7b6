"""Language models that predict tokens: the next one of text, of turns (also with images), of a target, or masked ones.

Masked positions are drawn per sample, so they depend neither on the batch nor on the world size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from finetune.config.sections.task import MaskedLmSection
from finetune.data.batch import IGNORED, Batch
from finetune.data.encoding.conversation import ConversationEncoder
from finetune.data.encoding.image_conversation import ImageConversationEncoder, ImageTextProcessor, images_of
from finetune.data.encoding.text import MaskedTextEncoder, SourceTargetEncoder, TextEncoder
from finetune.data.encoding.tokenizer import TextTokenizer, num_special_tokens_around
from finetune.data.features import Features
from finetune.data.templates.chat_template import require_chat_template
from finetune.data.token_cache.chunks import Encode
from finetune.data.token_cache.lengths import SampleLengthLimit, SourceTargetLengthLimit
from finetune.errors import DataError
from finetune.runtime.seeds import derive_seed
from finetune.task.lm_loss.target_loss import PluginLoss, TargetLoss
from finetune.task.lm_loss.token_loss import TokenLoss
from finetune.task.metrics import token_metrics
from finetune.task.model_inputs import (
    collate_padded,
    collate_padding_free,
    collate_row,
    decoder_input_ids,
    forward_inputs,
    is_padding_free,
    pad_rows,
    padded_batch,
    unwrap_model,
)
from finetune.task.protocol import (
    BaseTask,
    GenerationPrompt,
    RequireMessages,
    RequireText,
    TaskContext,
)


class TokenTask(BaseTask):
    """Predict tokens, with the configured loss of predicted tokens."""

    def __init__(self, context: TaskContext) -> None:
        section = context.section
        self.tokenizer: PreTrainedTokenizerBase = context.tokenizer
        self.data = context.data
        self.pad_id = pad_id(self.tokenizer)
        self.loss = TargetLoss(TokenLoss(section.label_smoothing, section.z_loss), context.loss_kernel)
        if section.loss is not None:
            self.loss = PluginLoss(TokenLoss(), context.loss_kernel, section.loss)

    def model_inputs(self, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Return the inputs with which the model predicts the labels."""
        return forward_inputs(model, batch)

    def loss_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum` and, with label smoothing or z-loss, the plain `cross_entropy`."""
        return self.loss.sums(model, batch, self.model_inputs(model, batch))

    def metric_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return `loss_sum` (the plain cross-entropy), `num_targets` and `num_correct`."""
        return self.loss.evaluation_sums(model, batch, self.model_inputs(model, batch))

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return `loss`, `perplexity` and `token_accuracy`."""
        return token_metrics(sums)


class CausalTask(TokenTask):
    """Predict each target token from the tokens before it.

    Rows become `input_ids` and `is_target`.
    """

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the samples padded, or concatenated if `data.batching` is padding-free."""
        is_row = is_padding_free(self.data.batching)
        return collate_padding_free(features) if is_row else collate_padded(features, pad_id=self.pad_id)


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
        return RequireMessages(ConversationEncoder(self.tokenizer, **self._turns))

    @property
    def _turns(self) -> dict[str, Any]:
        """Return how turns are encoded."""
        return {
            "train_on": self.data.train_on,
            "system_prompt": self.data.system_prompt,
            "template": self.data.chat_template,
            "allow_special_tokens": self.data.allow_special_tokens,
            "train_on_reasoning": self.data.train_on_reasoning,
        }

    def prompt(self, features: Features) -> GenerationPrompt | None:
        """Return all tokens before the last answer, and that answer with its end-of-turn token."""
        is_target = features.arrays["is_target"]
        end = int(np.flatnonzero(is_target)[-1]) + 1
        before = np.flatnonzero(~is_target[:end])
        start = int(before[-1]) + 1
        ids = features.arrays["input_ids"].tolist()
        return GenerationPrompt(input_ids=tuple(ids[:start]), reference_ids=tuple(ids[start:end]))


class VisionLanguageSftTask(SftTask):
    """`sft` with images in the turns, encoded by the model's own processor; image tokens are never targets.

    A batch without an image gets a row with a blank image and without targets, so that the image encoder runs on every
    rank; otherwise ranks would wait for each other forever (DDP, FSDP, ZeRO-3).
    """

    head = "image_text_to_text"
    _loading_cost = "heavy"

    def __init__(self, context: TaskContext) -> None:
        self._processor = context.processor
        self._processor.chat_template = context.tokenizer.chat_template
        super().__init__(context)
        self._pictures: ImageTextProcessor = self._pictured.pictures
        self._blank = self._pictured.blank()
        self.head_values = {"image_token_id": self._pictures.token_id}

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the samples padded on the right, with the processor's image inputs."""
        has_images = any(len(sample.arrays["image_sizes"]) for sample in features)
        rows = features if has_images else [*features, self._blank]
        batch = collate_padded(rows, pad_id=self.pad_id)
        per_token = {name: pad_rows([row.arrays[name] for row in rows], 0) for name in self._pictures.per_token}
        inputs = {**batch.inputs, **per_token, **self._pixels(rows)}
        num_tokens = sum(sample.length for sample in features)
        sample_ids = tuple(sample.sample_id for sample in features)
        return replace(batch, inputs=inputs, num_tokens=num_tokens, sample_ids=sample_ids)

    def prompt(self, features: Features) -> GenerationPrompt | None:
        """Return everything before the last answer, its images, and that answer with its end-of-turn token.

        A prompt without an image has a companion row with a blank one. None if an image follows the prompt.
        """
        prompt = super().prompt(features)
        assert prompt is not None
        length, ids = len(prompt.input_ids), features.arrays["input_ids"]
        if self._pictures.token_id in ids[length:]:
            return None
        names = ("input_ids", "is_target", *self._pictures.per_token)  # of the arrays with one value per token
        prompt_features = Features({**features.arrays, **{name: features.arrays[name][:length] for name in names}})
        rows = [prompt_features] if len(features.arrays["image_sizes"]) else [prompt_features, self._blank]
        companion = () if len(rows) == 1 else tuple(self._blank.arrays["input_ids"].tolist())
        per_token = {name: tuple(tuple(row.arrays[name].tolist()) for row in rows) for name in self._pictures.per_token}
        return replace(prompt, inputs=self._pixels(rows), companion_ids=companion, per_token=per_token)

    def _make_encoder(self) -> Encode:
        self._pictured = ImageConversationEncoder(self._processor, **self._turns)
        return RequireMessages(self._pictured, reads_images=True)

    def _pixels(self, rows: Sequence[Features]) -> dict[str, Tensor]:
        """Return the processor's inputs for the rows' images, batched by the processor."""
        images = [images_of(row) for row in rows]
        texts = [self._pictures.mark * len(row_images) for row_images in images]
        outputs = self._processor(text=texts, images=images, padding=True, return_tensors="pt")
        of_text = {"input_ids", "attention_mask", *self._pictures.per_token}
        return {name: value for name, value in outputs.items() if name not in of_text and isinstance(value, Tensor)}


class Seq2SeqTask(TokenTask):
    """Predict each token of the target from the source and the tokens before it, end-of-sequence included.

    Rows become `input_ids`, the source followed by the target, and `is_target`, which marks the target.
    """

    head = "seq2seq_lm"

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context)
        data, section = self.data, context.section.seq2seq
        self._encoder = SourceTargetEncoder(
            self.tokenizer, prefix=section.source_prefix, allow_special_tokens=data.allow_special_tokens
        )
        self._length_limit = SourceTargetLengthLimit(
            data.longest,
            section.max_target_length or data.longest,
            data.over_length,
            data.truncate_side,
            num_special_tokens_around(self.tokenizer),
        )
        self._identity = section.model_dump()

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return sources and targets padded on the right; labels[b, t] is the target's token t."""
        sources, targets = zip(*map(_source_and_target, features), strict=True)
        batch = padded_batch(features, sources, targets, pad_id=self.pad_id)
        return replace(batch, lengths=tuple(map(len, sources)))

    def model_inputs(self, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Return the inputs with which the decoder predicts the labels.

        These are the targets shifted by one, as the model itself shifts labels; with labels it would compute a mean
        loss.
        """
        before = decoder_input_ids(unwrap_model(model), batch.labels)
        return {**batch.inputs, "decoder_input_ids": before, "use_cache": False}

    def prompt(self, features: Features) -> GenerationPrompt | None:
        """Return the source, and the target with its end-of-sequence token."""
        source, target = _source_and_target(features)
        return GenerationPrompt(input_ids=tuple(source.tolist()), reference_ids=tuple(target.tolist()))


def _source_and_target(features: Features) -> tuple[np.ndarray, np.ndarray]:
    ids, is_target = features.arrays["input_ids"].astype(np.int64), features.arrays["is_target"]
    return ids[~is_target], ids[is_target]


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
        ids, labels = zip(*map(self._mask, features), strict=True)
        if is_padding_free(self.data.batching):
            return collate_row(features, {"input_ids": ids}, token_labels=np.concatenate(labels))
        return padded_batch(features, ids, labels, pad_id=self.pad_id)

    def metrics(self, sums: Mapping[str, float], records: Tensor | None = None) -> Mapping[str, float]:
        """Return `loss`, `perplexity` and `masked_accuracy`, over the masked tokens."""
        measured = token_metrics(sums)
        measured["masked_accuracy"] = measured.pop("token_accuracy")
        return measured
