"""Vision-language supervised fine-tuning: train on the answers of conversations with images."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finetune.data.batch import Batch
from finetune.data.encoding.image_conversation import ImageConversationEncoder, ImageTextProcessor, images_of
from finetune.data.features import Features
from finetune.data.token_cache.chunks import Encode
from finetune.task.base import RequireImageMessages
from finetune.task.causal_lm import SftTask
from finetune.task.model_inputs import collate_padded
from finetune.task.protocol import GenerationPrompt, ModelHead, SampleSpec, TaskContext


class VisionLanguageSftTask(SftTask):
    """`sft` with images in the turns, encoded by the model's own processor; image tokens are never targets.

    A batch without an image gets a row with a blank image and without targets, so that the image encoder runs on every
    rank; otherwise ranks would wait for each other forever (DDP, FSDP, ZeRO-3).
    """

    head: ModelHead = "image_text_to_text"

    def __init__(self, context: TaskContext) -> None:
        self._processor = context.processor
        self._processor.chat_template = context.tokenizer.chat_template
        super().__init__(context)
        self._pictures: ImageTextProcessor = self._pictured.pictures
        self._blank = self._pictured.blank()

    @property
    def head_values(self) -> Mapping[str, Any]:
        """Return the id of the processor's image token."""
        return {"image_token_id": self._pictures.token_id}

    @property
    def samples(self) -> SampleSpec:
        """Return samples with a heavy loading cost, because of their images."""
        return replace(super().samples, loading_cost="heavy")

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the samples padded on the right, with the processor's image inputs."""
        has_images = any(len(sample.arrays["image_sizes"]) for sample in features)
        rows = features if has_images else [*features, self._blank]
        batch = collate_padded(rows, pad_id=self.pad_id)
        inputs = {**batch.inputs, **self._per_token(rows), **self._pixels(rows)}
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
        prompt_features = Features(
            {**features.arrays, **{name: features.arrays[name][:length] for name in self._names}}
        )
        rows = [prompt_features] if len(features.arrays["image_sizes"]) else [prompt_features, self._blank]
        companion = () if len(rows) == 1 else tuple(self._blank.arrays["input_ids"].tolist())
        per_token = {name: tuple(tuple(row.arrays[name].tolist()) for row in rows) for name in self._pictures.per_token}
        return replace(prompt, inputs=self._pixels(rows), companion_ids=companion, per_token=per_token)

    def _make_encoder(self) -> Encode:
        data = self.data
        self._pictured = ImageConversationEncoder(
            self._processor,
            train_on=data.train_on,
            system_prompt=data.system_prompt,
            template=data.chat_template,
            allow_special_tokens=data.allow_special_tokens,
            train_on_reasoning=data.train_on_reasoning,
        )
        return RequireImageMessages(self._pictured)

    @property
    def _names(self) -> tuple[str, ...]:
        """Return the names of the arrays with one value per token."""
        return ("input_ids", "is_target", *self._pictures.per_token)

    def _per_token(self, rows: Sequence[Features]) -> dict[str, Tensor]:
        """Return the model's other per-token inputs, [batch, length], 0 at padding."""
        longest = max(row.length for row in rows)
        values_by_name = {}
        for name in self._pictures.per_token:
            values = np.zeros((len(rows), longest), dtype=np.int64)
            for index, row in enumerate(rows):
                values[index, : row.length] = row.arrays[name]
            values_by_name[name] = torch.from_numpy(values)
        return values_by_name

    def _pixels(self, rows: Sequence[Features]) -> dict[str, Tensor]:
        """Return the processor's inputs for the rows' images, batched by the processor."""
        images = [images_of(row) for row in rows]
        texts = [self._pictures.mark * len(row_images) for row_images in images]
        outputs = self._processor(text=texts, images=images, padding=True, return_tensors="pt")
        of_text = {"input_ids", "attention_mask", *self._pictures.per_token}
        return {name: value for name, value in outputs.items() if name not in of_text and isinstance(value, Tensor)}
