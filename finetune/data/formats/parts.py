"""The content of a turn as a list of parts, texts and images, as OpenAI and Hugging Face write them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from finetune.data.rows import describe
from finetune.errors import DataError

Part = Mapping[str, Any]
"""`{type: text, text: ...}` or `{type: image}`, the latter with `image` (the picture) or `index` where it is told."""

_IMAGE_TYPES = ("image", "image_url")
_SOURCES = ("image", "path", "url", "bytes", "base64", "image_url")
"""The keys under which an image part may hold its picture."""


def has_images(content: Any) -> TypeGuard[Sequence[Any]]:
    """Tell whether the content is a list of parts of which one is an image."""
    return isinstance(content, list) and any(is_image(part) for part in content)


def is_image(part: Any) -> bool:
    """Tell whether the part is an image."""
    return isinstance(part, Mapping) and part.get("type") in _IMAGE_TYPES


def read_parts(content: Sequence[Any], *, number: int) -> list[Part]:
    """Return the parts of turn `number` with one name for each thing; raises DataError for one that is neither."""
    return [_read_part(part, number=number) for part in content]


def _read_part(part: Any, *, number: int) -> Part:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if is_image(part):
        return _read_image(part)
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    kind = f"type {part.get('type')!r}" if isinstance(part, Mapping) else describe(part)
    raise DataError(f"turn {number} has a part of {kind}. Parts are `text` and `image`; others are not read.")


def _read_image(part: Part) -> Part:
    for name in _SOURCES:
        if part.get(name) is not None:
            source = part[name]
            nested = source.get("url") if name == "image_url" and isinstance(source, Mapping) else source
            return {"type": "image", "image": nested}
    index = part.get("index")
    return {"type": "image"} if index is None else {"type": "image", "index": index}
