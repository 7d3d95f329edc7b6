"""A text as a model's processor writes it out: each mark of an image becomes the tokens that the model reads of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from finetune.data.encoding.chat import is_special
from finetune.data.images.decode import decode_image
from finetune.errors import DataError

_OFFSETS = "text_replacement_offsets"
_PLAIN = frozenset({"input_ids", "attention_mask", _OFFSETS})
_CROSS_ATTENTION = "cross_attention_mask"
_BLANK_PIXELS = 64


@dataclass(frozen=True)
class Expansion:
    """A text as the processor writes it out, and where its image marks went."""

    text: str
    ids: tuple[int, ...]  # what the model would be given, a beginning-of-sequence included
    gains: tuple[tuple[int, int], ...]  # behind which character of the text as it was, how many were added
    per_token: Mapping[str, np.ndarray]  # what else the model is given of each token
    written: tuple[str, ...]  # in place of each mark

    def moved(self, place: int) -> int:
        """Return where a character of the text as it was stands now."""
        return place + sum(added for end, added in self.gains if end <= place)


class Pictures:
    """A processor of images and text, asked for one row at a time."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.mark = str(getattr(processor, "image_token", None) or "")
        if not self.mark:
            raise DataError(f"{type(processor).__name__} has no image token: it cannot place images in a conversation.")

    def expand(self, text: str, images: Sequence[bytes]) -> Expansion:
        """Return the text with each image's mark written out; raises DataError for an image that is none."""
        begins = self.processor.tokenizer.bos_token
        outputs = self._asked(text, images, add_special_tokens=not (begins and text.startswith(begins)))
        changes = outputs[_OFFSETS][0] if images else []
        ids = tuple(map(int, outputs["input_ids"][0]))
        return Expansion(
            text=_replaced(text, changes),
            ids=ids,
            gains=tuple((each["span"][1], len(each["replacement"]) - len(each["text"])) for each in changes),
            per_token={name: np.asarray(outputs[name][0], np.uint8) for name in self.per_token if name in outputs},
            written=tuple(str(each["replacement"]) for each in changes),
        )

    @cached_property
    def blank(self) -> bytes:
        """Return an encoded image of nothing."""
        file = BytesIO()
        Image.new("RGB", (_BLANK_PIXELS, _BLANK_PIXELS), "white").save(file, "png")
        return file.getvalue()

    @cached_property
    def per_token(self) -> tuple[str, ...]:
        """Return the names of what else the model is given of each token, such as `mm_token_type_ids`."""
        outputs = self._asked(self.mark, [self.blank])
        if _OFFSETS not in outputs or _CROSS_ATTENTION in outputs:
            raise DataError(
                f"{type(self.processor).__name__} does not write images as tokens of the text, or does not tell where. "
                "Models that do: LLaVA, Qwen-VL, SmolVLM and Idefics3, Gemma 3, InternVL, Mistral 3 and others."
            )
        length = len(outputs["input_ids"][0])
        return tuple(name for name in outputs if name not in _PLAIN and _is_per_token(outputs[name], length))

    @cached_property
    def token_id(self) -> int:
        """Return the token at whose places the model puts what it has read of an image."""
        ids = map(int, self._asked(self.mark, [self.blank])["input_ids"][0])
        special = Counter(token for token in ids if is_special(self.processor.tokenizer, token))
        return special.most_common(1)[0][0]

    def _asked(self, text: str, images: Sequence[bytes], **settings: Any) -> Mapping[str, Any]:
        shown = [decoded(image, number) for number, image in enumerate(images, start=1)]
        wish = {"return_text_replacement_offsets": True} if images else {}
        try:
            return dict(self.processor(text=[text], images=[shown] if images else None, **wish, **settings))
        except (ValueError, TypeError, IndexError) as error:
            raise DataError(f"{type(self.processor).__name__} refuses the row: {error}") from error


def decoded(image: bytes, number: int) -> Image.Image:
    """Return the image of a row; raises DataError with its number for one that is broken."""
    try:
        return decode_image(image)
    except DataError as error:
        raise DataError(f"image {number}: {error}") from error


def _is_per_token(value: Any, length: int) -> bool:
    """Tell whether the processor's output holds one number for each token of the only row."""
    try:
        return np.asarray(value[0]).shape == (length,) and len(value) == 1
    except (TypeError, ValueError, IndexError, KeyError):
        return False


def _replaced(text: str, changes: Sequence[Mapping[str, Any]]) -> str:
    pieces, last = [], 0
    for each in changes:
        start, end = each["span"]
        pieces += [text[last:start], str(each["replacement"])]
        last = end
    return "".join([*pieces, text[last:]])
