"""Vision-language supervised fine-tuning: learn the answers of conversations that show images."""

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
from finetune.data.workers import LoadingCost
from finetune.task.causal_lm import SftTask
from finetune.task.model_inputs import collate_padded
from finetune.task.protocol import GenerationPrompt, ModelHead, TaskContext
from finetune.task.row_formats import RequireImageMessages


class VisionLanguageSftTask(SftTask):
    """`sft` with images in the turns, through the model's own processor; an image's tokens are never targets.

    Every batch holds an image: one that has none gets a further row with a blank one and without targets. A model whose
    part for images took part on some ranks alone would wait for the others for ever (DDP, FSDP, ZeRO-3).
    """

    head: ModelHead = "image_text_to_text"
    loading_cost: LoadingCost = "heavy"

    def __init__(self, context: TaskContext) -> None:
        self._processor = context.processor
        self._processor.chat_template = context.tokenizer.chat_template
        super().__init__(context)
        self._pictures: ImageTextProcessor = self._pictured.pictures
        self._blank = self._pictured.blank()

    @property
    def head_values(self) -> Mapping[str, Any]:
        """Return the token that stands for a piece of an image, as the processor writes it."""
        return {"image_token_id": self._pictures.token_id}

    def collate(self, features: Sequence[Features]) -> Batch:
        """Return the samples padded on the right, with what the processor makes of their images."""
        has_images = any(len(each.arrays["image_sizes"]) for each in features)
        rows = features if has_images else [*features, self._blank]
        batch = collate_padded(rows, pad_id=self.pad_id)
        inputs = {**batch.inputs, **self._per_token(rows), **self._pixels(rows)}
        num_tokens = sum(each.length for each in features)
        return replace(
            batch, inputs=inputs, num_tokens=num_tokens, sample_ids=tuple(each.sample_id for each in features)
        )

    def prompt(self, features: Features) -> GenerationPrompt | None:
        """Return all before the last answer, its images, and that answer as learnt.

        A prompt without an image has a blank one beside it. None where an image stands behind the prompt.
        """
        prompt = super().prompt(features)
        assert prompt is not None
        length, ids = len(prompt.input_ids), features.arrays["input_ids"]
        if self._pictures.token_id in ids[length:]:
            return None
        asked = Features({**features.arrays, **{name: features.arrays[name][:length] for name in self._names}})
        rows = [asked] if len(features.arrays["image_sizes"]) else [asked, self._blank]
        beside = () if len(rows) == 1 else tuple(self._blank.arrays["input_ids"].tolist())
        per_token = {name: tuple(tuple(row.arrays[name].tolist()) for row in rows) for name in self._pictures.per_token}
        return replace(prompt, inputs=self._pixels(rows), companion_ids=beside, per_token=per_token)

    def _make_encoder(self) -> Encode:
        data = self.data
        self._pictured = ImageConversationEncoder(
            self._processor,
            train_on=data.train_on,
            system_prompt=data.system_prompt,
            template=data.chat_template,
            allow_special_tokens=data.allow_special_tokens,
        )
        return RequireImageMessages(self._pictured)

    @property
    def _names(self) -> tuple[str, ...]:
        """Return the names of the arrays that have a value for each token."""
        return ("input_ids", "is_target", *self._pictures.per_token)

    def _per_token(self, rows: Sequence[Features]) -> dict[str, Tensor]:
        """Return what else the model is given of each token, [batch, length], 0 where there is padding."""
        longest = max(each.length for each in rows)
        told = {}
        for name in self._pictures.per_token:
            values = np.zeros((len(rows), longest), dtype=np.int64)
            for place, each in enumerate(rows):
                values[place, : each.length] = each.arrays[name]
            told[name] = torch.from_numpy(values)
        return told

    def _pixels(self, rows: Sequence[Features]) -> dict[str, Tensor]:
        """Return what the processor makes of the rows' images, as it batches them itself."""
        images = [images_of(each) for each in rows]
        texts = [self._pictures.mark * len(each) for each in images]
        outputs = self._processor(text=texts, images=images, padding=True, return_tensors="pt")
        of_text = {"input_ids", "attention_mask", *self._pictures.per_token}
        return {name: value for name, value in outputs.items() if name not in of_text and isinstance(value, Tensor)}
