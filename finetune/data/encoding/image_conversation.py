"""Encode conversations with images: each image is expanded in the text to the tokens that the model reads."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from finetune.data.encoding.control_tokens import texts_in
from finetune.data.encoding.conversation import ConversationEncoder
from finetune.data.encoding.target_spans import LAST_ALONE, RenderedChat, Span, TrainOn
from finetune.data.encoding.template_support import DroppedContentCheck
from finetune.data.encoding.tokenizer import EncodedText
from finetune.data.features import Features
from finetune.data.formats.conversations import PLACEHOLDER
from finetune.data.images import decode_image
from finetune.data.rows import Row, Turn
from finetune.data.templates.chat_template import is_special
from finetune.data.templates.rendering import render_chat
from finetune.errors import DataError

_OFFSETS = "text_replacement_offsets"
_PLAIN = frozenset({"input_ids", "attention_mask", _OFFSETS})
_CROSS_ATTENTION = "cross_attention_mask"
_BLANK_PIXELS = 64


@dataclass(frozen=True)
class ExpandedText:
    """A text with its image placeholders expanded by the processor, and the mapping of offsets."""

    text: str
    ids: tuple[int, ...]  # the model's input ids, including beginning-of-sequence
    gains: tuple[tuple[int, int], ...]  # (offset in the original text, number of characters added there)
    per_token: Mapping[str, np.ndarray]  # further per-token model inputs
    expansions: tuple[str, ...]  # the expansion of each placeholder

    def moved(self, offset: int) -> int:
        """Return the offset in the expanded text of an offset in the original text."""
        return offset + sum(added for end, added in self.gains if end <= offset)


class ImageTextProcessor:
    """Wraps a processor of images and text; processes one row at a time."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.mark = str(getattr(processor, "image_token", None) or "")
        if not self.mark:
            raise DataError(f"{type(processor).__name__} has no image token: it cannot place images in a conversation.")

    def expand(self, text: str, images: Sequence[bytes]) -> ExpandedText:
        """Return the text with each image placeholder expanded; raises DataError for an invalid image."""
        bos = self.processor.tokenizer.bos_token
        outputs = self._process(text, images, add_special_tokens=not (bos and text.startswith(bos)))
        changes = outputs[_OFFSETS][0] if images else []
        ids = tuple(map(int, outputs["input_ids"][0]))
        pieces, last = [], 0
        for change in changes:
            start, end = change["span"]
            pieces += [text[last:start], str(change["replacement"])]
            last = end
        return ExpandedText(
            text="".join([*pieces, text[last:]]),
            ids=ids,
            gains=tuple((change["span"][1], len(change["replacement"]) - len(change["text"])) for change in changes),
            per_token={name: np.asarray(outputs[name][0], np.uint8) for name in self.per_token if name in outputs},
            expansions=tuple(str(change["replacement"]) for change in changes),
        )

    @cached_property
    def blank(self) -> bytes:
        """Return an encoded blank image."""
        file = BytesIO()
        Image.new("RGB", (_BLANK_PIXELS, _BLANK_PIXELS), "white").save(file, "png")
        return file.getvalue()

    @cached_property
    def per_token(self) -> tuple[str, ...]:
        """Return the names of further per-token model inputs, such as `mm_token_type_ids`."""
        outputs = self._process(self.mark, [self.blank])
        if _OFFSETS not in outputs or _CROSS_ATTENTION in outputs:
            raise DataError(
                f"{type(self.processor).__name__} does not expand images into text tokens, or does not report offsets. "
                "Models that do: LLaVA, Qwen-VL, SmolVLM and Idefics3, Gemma 3, InternVL, Mistral 3 and others."
            )
        length, names = len(outputs["input_ids"][0]), []
        for name in outputs.keys() - _PLAIN:  # those with one number per token of the single row
            with suppress(TypeError, ValueError, IndexError, KeyError):
                if np.asarray(outputs[name][0]).shape == (length,) and len(outputs[name]) == 1:
                    names.append(name)
        return tuple(name for name in outputs if name in names)

    @cached_property
    def token_id(self) -> int:
        """Return the token whose positions the model fills with image features."""
        ids = map(int, self._process(self.mark, [self.blank])["input_ids"][0])
        special = Counter(token for token in ids if is_special(self.processor.tokenizer, token))
        return special.most_common(1)[0][0]

    def _process(self, text: str, images: Sequence[bytes], **settings: Any) -> Mapping[str, Any]:
        decoded = [decode_row_image(image, number) for number, image in enumerate(images, start=1)]
        options = {"return_text_replacement_offsets": True} if images else {}
        try:
            return dict(self.processor(text=[text], images=[decoded] if images else None, **options, **settings))
        except (ValueError, TypeError, IndexError) as error:
            raise DataError(f"{type(self.processor).__name__} refuses the row: {error}") from error


def decode_row_image(image: bytes, number: int) -> Image.Image:
    """Return the decoded image of a row; raises DataError with its number if it is broken."""
    try:
        return decode_image(image)
    except DataError as error:
        raise DataError(f"image {number}: {error}") from error


IMAGES, SIZES = "images", "image_sizes"
"""The arrays of a sample's images: their encoded bytes concatenated (uint8), and the size of each in bytes (int64)."""


@dataclass(frozen=True)
class RenderedImageChat(RenderedChat):
    """A rendered chat whose text has its images expanded."""

    expansion: ExpandedText
    images: tuple[bytes, ...]


class ImageConversationEncoder(ConversationEncoder):
    """Encodes conversations with images; the tokens of an image are never targets.

    Features hold `input_ids`, `is_target`, the processor's further per-token inputs, and the encoded images.
    """

    def __init__(
        self,
        processor: Any,
        *,
        train_on: TrainOn = "assistant",
        system_prompt: str | None = None,
        template: str | None = None,
        allow_special_tokens: bool = False,
        train_on_reasoning: bool = True,
    ) -> None:
        tokenizer = processor.tokenizer
        super().__init__(
            tokenizer,
            train_on=train_on,
            system_prompt=system_prompt,
            template=template,
            allow_special_tokens=allow_special_tokens,
            train_on_reasoning=train_on_reasoning,
        )
        self.pictures = ImageTextProcessor(processor)
        self._as_parts = _requires_parts(tokenizer)

    def blank(self) -> Features:
        """Return a sample of a blank image, without a target."""
        expansion = self.pictures.expand(self.pictures.mark, [self.pictures.blank])
        ids = np.array(expansion.ids, np.uint32)
        arrays = {"input_ids": ids, "is_target": np.zeros(len(ids), dtype=bool)}
        return Features({**arrays, **expansion.per_token, **_image_arrays([self.pictures.blank])})

    def _turns(self, row: Row) -> Sequence[Turn]:
        turns = super()._turns(row)
        if self._finder.train_on in LAST_ALONE:
            last = max((index for index, turn in enumerate(turns) if turn["role"] == "assistant"), default=-1)
            turns = turns[: last + 1] or turns
        return [_in_parts(turn) for turn in turns] if self._as_parts else turns

    def _rendered_chat(self, row: Row, drops: DroppedContentCheck) -> RenderedChat | None:
        mark = self.pictures.mark
        texts = () if row.get("images") else texts_in(row["messages"])
        if found := [name for name in (mark, PLACEHOLDER) if any(name in text for text in texts)]:
            raise DataError(
                f"has no images, but a text with the placeholder of one, `{found[0]}`. Name the column of its images "
                "with `columns: {images: NAME}`, or remove the placeholder."
            )
        chat = super()._rendered_chat(row, drops)
        if chat is None:
            return None
        contents = [content for turn in self._turns(row) if isinstance(content := turn.get("content"), list)]
        num_images = sum(part.get("type") == "image" for content in contents for part in content)
        if (num_marks := chat.text.count(mark)) != num_images:
            raise DataError(
                f"has {num_images} images, but the rendered conversation contains `{mark}`, the processor's image "
                f"placeholder, {num_marks} times. The chat template must write one for each part of type "
                f"`image`, and no text may contain it."
            )
        images = tuple(image.read() for image in list(row.get("images", ()))[:num_images])
        expansion = self.pictures.expand(chat.text, images)
        spans = [Span(expansion.moved(s.start), expansion.moved(s.end), s.what) for s in chat.spans]
        return RenderedImageChat(
            expansion.text,
            tuple(spans),
            chat.may_be_open,
            expansion,
            images,
            has_control_names=chat.has_control_names,
            findings=chat.findings,
        )

    def _features(self, chat: RenderedChat, encoded: EncodedText) -> Features:
        assert isinstance(chat, RenderedImageChat)
        features = super()._features(chat, encoded)
        processed_text = chat.text if chat.has_control_names else None  # the text that the processor was given
        ours = encoded.ids if processed_text is None else np.asarray(self._tokens.ids(processed_text), np.uint32)
        prefix = _prefix(chat.expansion.ids, ours, tokenizer=self._tokenizer)
        ids = np.concatenate([np.array(prefix, np.uint32), features.arrays["input_ids"]])
        is_target = np.concatenate([np.zeros(len(prefix), dtype=bool), features.arrays["is_target"]])
        tokens = {token for text in set(chat.expansion.expansions) for token in self._tokens.remembered(text)}
        is_target &= ~np.isin(ids, [token for token in tokens if is_special(self._tokenizer, token)])
        per_token = chat.expansion.per_token
        if chat.has_control_names:
            per_token = {name: _by_token(values, chat.expansion.ids, ids) for name, values in per_token.items()}
        per_token_arrays = {}
        for name in self.pictures.per_token:
            values = per_token.get(name, np.zeros(0, np.uint8))[: len(ids)]
            per_token_arrays[name] = np.zeros(len(ids), np.uint8)  # 0 for a token appended at the end
            per_token_arrays[name][: len(values)] = values
        return Features({"input_ids": ids, "is_target": is_target, **per_token_arrays, **_image_arrays(chat.images)})


def images_of(features: Features) -> list[Image.Image]:
    """Return the sample's decoded images, possibly none. Raises DataError for a broken image."""
    ends = np.cumsum(features.arrays[SIZES])
    content = features.arrays[IMAGES]
    starts = ends - features.arrays[SIZES]
    return [
        decode_row_image(content[start:end].tobytes(), number)
        for number, (start, end) in enumerate(zip(starts, ends, strict=True), start=1)
    ]


def _image_arrays(images: Sequence[bytes]) -> dict[str, np.ndarray]:
    content = np.frombuffer(b"".join(images), np.uint8)
    return {IMAGES: content, SIZES: np.array([len(image) for image in images], np.int64)}


def _by_token(values: np.ndarray, theirs: Sequence[int], ours: np.ndarray) -> np.ndarray:
    """Return the value of each of our tokens, looked up by token in theirs: 1 for image tokens, 0 for others."""
    values_of = dict(zip(theirs, values.tolist(), strict=False))
    if [values_of[token] for token in theirs] != values.tolist():
        raise DataError(
            "contains names of control tokens, which this processor cannot encode as plain text. Remove the names."
        )
    return np.array([values_of.get(int(token), 0) for token in ours], values.dtype)


def _prefix(theirs: Sequence[int], ours: np.ndarray, *, tokenizer: Any) -> tuple[int, ...]:
    """Return the beginning-of-sequence that the processor prepends to the conversation.

    Raises DataError if its other tokens differ from the text's: the prompt at inference would differ from training.
    """
    num_more = len(theirs) - len(ours)
    if num_more == 0 and list(theirs) == ours.tolist():
        return ()
    if num_more == 1 and theirs[0] == tokenizer.bos_token_id and list(theirs[1:]) == ours.tolist():
        return (int(theirs[0]),)
    raise DataError(
        "the processor encodes the conversation differently from its tokenizer: the targets cannot be determined. "
        "It may add tokens at the end: see `add_eos_token` in tokenizer_config.json."
    )


def _requires_parts(tokenizer: Any) -> bool:
    """Return whether the chat template requires every content as a list of parts, as most with images do."""
    texts = ("Xyzzy", "Plugh")
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
    try:
        rendered = render_chat(tokenizer, [_in_parts(turn) for turn in turns]).text
    except DataError:
        return False
    return all(text in rendered for text in texts) and "'type'" not in rendered


def _in_parts(turn: Turn) -> Turn:
    content = turn.get("content")
    return {**turn, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else turn
