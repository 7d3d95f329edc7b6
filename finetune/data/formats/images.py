"""Rows with images: an image and its class, or turns that say where the row's images stand."""

from collections.abc import Mapping, Sequence
from typing import Any

from finetune.data.formats.columns import Columns
from finetune.data.images.stored_image import stored_image
from finetune.data.rows import Row, describe
from finetune.data.turns import Part, Turn, has_images
from finetune.errors import DataError


def read_image_label(columns: Columns) -> Row:
    """Return the image, whose file is not read yet, and its label."""
    title = columns.title("image")
    image = stored_image(columns.value("image"), folder=columns.folder, title=title, root=columns.image_root)
    label = columns.labels("label")
    if not isinstance(label, str | int):
        raise DataError(f"{columns.title('label')} must be text or a whole number, but is {describe(label)}.")
    return {"image": image, "label": label}


PLACEHOLDER = "<image>"
"""Where LLaVA's rows put an image in a plain text (Liu et al., 2023, arXiv:2304.08485), whatever the model's own is."""


def attach_images(row: Row, columns: Columns) -> Row:
    """Return the row of `messages` with its `images`, for each of which a turn has a part `{type: image}`.

    Images are in the parts themselves, or in the column `images`: there in the order of the parts without an image of
    their own, or of the placeholders `<image>` in plain texts; with neither they stand before the first question. A row
    without any is returned as it is. Raises DataError where places and images are not equally many.
    """
    given = _given(columns.optional("images"))
    messages: Sequence[Turn] = row["messages"]
    if any(has_images(turn.get("content")) for turn in messages):
        placed = messages
    elif given:
        placed = _placed(messages, num_images=len(given))
    else:
        return row
    _refuse_drawn_answers(placed)
    sources = _sources(placed, given)
    images = [
        stored_image(source, folder=columns.folder, title=f"image {number}", root=columns.image_root)
        for number, source in enumerate(sources, start=1)
    ]
    return {**row, "messages": [_without_sources(turn) for turn in placed], "images": images}


def _given(value: Any) -> list[Any]:
    if value is None:
        return []
    return [each for each in value if each is not None] if isinstance(value, list | tuple) else [value]


def _placed(messages: Sequence[Turn], *, num_images: int) -> Sequence[Turn]:
    """Return the turns with an image part for each placeholder, or with all before the first question."""
    num_places = sum(_text(turn).count(PLACEHOLDER) for turn in messages)
    if num_places:
        return [_with_parts(turn) if PLACEHOLDER in _text(turn) else turn for turn in messages]
    first = next((place for place, turn in enumerate(messages) if turn["role"] == "user"), None)
    if first is None:
        raise DataError(f"has {_count(num_images)}, but no user turn to show it in.")
    parts = [{"type": "image"}] * num_images + _text_part(_text(messages[first]))
    return [{**turn, "content": parts} if place == first else turn for place, turn in enumerate(messages)]


def _with_parts(turn: Turn) -> Turn:
    """Return the turn cut at its placeholders; the blanks around them are the template's business."""
    texts = _text(turn).split(PLACEHOLDER)
    parts = _text_part(texts[0].rstrip())
    for text in texts[1:]:
        parts += [{"type": "image"}, *_text_part(text.strip())]
    return {**turn, "content": parts}


def _text_part(text: str) -> list[Part]:
    return [{"type": "text", "text": text}] if text else []


def _refuse_drawn_answers(messages: Sequence[Turn]) -> None:
    for number, turn in enumerate(messages, start=1):
        if turn["role"] == "assistant" and has_images(turn.get("content")):
            raise DataError(f"turn {number} is an answer with an image, but the model can only write text.")


def _sources(messages: Sequence[Turn], given: Sequence[Any]) -> list[Any]:
    """Return the images in the order in which the turns show them; raises DataError unless all of them are shown."""
    parts = [part for turn in messages for part in turn.get("content") or () if _is_image(part)]
    open_places = [part for part in parts if "image" not in part]
    if len(open_places) != len(given):
        raise DataError(
            f"has {_count(len(given))} in its column and {len(open_places)} placeholders in its turns. Write one "
            f"placeholder for each, `{PLACEHOLDER}` in a text or a part `{{type: image}}`; or none: then they are "
            f"put before the first question."
        )
    indices = [part.get("index", place) for place, part in enumerate(open_places)]
    if sorted(indices) != list(range(len(given))):
        raise DataError(
            f"has image parts with the `index` {indices}, which do not refer to each of its images exactly once."
        )
    ordered = iter([given[index] for index in indices])
    return [part["image"] if "image" in part else next(ordered) for part in parts]


def _without_sources(turn: Turn) -> Turn:
    content = turn.get("content")
    if not isinstance(content, list):
        return turn
    return {**turn, "content": [{"type": "image"} if _is_image(part) else part for part in content]}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _text(turn: Turn) -> str:
    content = turn.get("content")
    return content if isinstance(content, str) else ""


def _count(number: int) -> str:
    return f"{number} image{'' if number == 1 else 's'}"
