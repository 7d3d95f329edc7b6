"""Images of conversations: they are in the parts of turns, or in a column, in the order of the placeholders."""

from collections.abc import Sequence
from typing import Any

from finetune.data.formats.columns import Columns
from finetune.data.rows import Part, Row, Turn, has_images, is_image_part
from finetune.errors import DataError

UNREAD_IMAGE = "unread_image"
"""A row's key: the column whose images are not read."""

PLACEHOLDER = "<image>"
"""LLaVA's image placeholder in plain text (Liu et al., 2023, arXiv:2304.08485), independent of the model's own."""


def attach_images(row: Row, columns: Columns) -> Row:
    """Return the row with `messages` and its `images`; for each image, a turn has a part `{type: image}`.

    Images are in the parts themselves or in the column `images`, in the order of the parts without an image, or of the
    placeholders `<image>` in plain texts; with neither, they are put before the first question. A row without images is
    returned unchanged. Raises DataError if the numbers of placeholders and images differ.
    """
    value = columns.optional("images") if "images" not in columns.names.template else columns.listed("images")
    given = value if isinstance(value, list | tuple) else [value]
    given = [image for image in given if image not in (None, "")]
    messages: Sequence[Turn] = row["messages"]
    if any(has_images(turn.get("content")) for turn in messages):
        placed = messages
    elif given:
        placed = _placed(messages, num_images=len(given))
    else:
        unread = columns.unread_image()
        return {**row, UNREAD_IMAGE: unread} if unread else row
    for number, turn in enumerate(placed, start=1):
        if turn["role"] == "assistant" and has_images(turn.get("content")):
            raise DataError(f"turn {number} is an answer with an image, but the model can only generate text.")
    sources = _sources(placed, given)
    images = [columns.image(source, title=f"image {number}") for number, source in enumerate(sources, start=1)]
    turns = []
    for turn in placed:
        content = turn.get("content")
        if isinstance(content, list):
            content = [{"type": "image"} if is_image_part(part) else part for part in content]
            turn = {**turn, "content": content}
        turns.append(turn)
    return {**row, "messages": turns, "images": images}


def _placed(messages: Sequence[Turn], *, num_images: int) -> Sequence[Turn]:
    """Return the turns with an image part for each placeholder, or with all images before the first question."""
    for number, turn in enumerate(messages, start=1):
        if isinstance(turn.get("content"), list):
            raise DataError(
                f"turn {number} has several text parts and {_count(num_images)} in its column. Write a part "
                "`{type: image}` where each image belongs."
            )
    if any(PLACEHOLDER in _text(turn) for turn in messages):
        turns = []
        for turn in messages:
            first, *others = _text(turn).split(PLACEHOLDER)
            if others:  # without the whitespace around placeholders, which the template writes
                parts = _text_part(first.rstrip())
                for text in others:
                    parts += [{"type": "image"}, *_text_part(text.strip())]
                turn = {**turn, "content": parts}
            turns.append(turn)
        return turns
    question = next((index for index, turn in enumerate(messages) if turn["role"] == "user"), None)
    if question is None:
        raise DataError(f"has {_count(num_images)}, but no user turn to put it in.")
    parts = [{"type": "image"}] * num_images + _text_part(_text(messages[question]))
    return [{**turn, "content": parts} if index == question else turn for index, turn in enumerate(messages)]


def _text_part(text: str) -> list[Part]:
    return [{"type": "text", "text": text}] if text else []


def _sources(messages: Sequence[Turn], given: Sequence[Any]) -> list[Any]:
    """Return the images in the order of the turns; raises DataError unless every image is in a turn."""
    parts = [part for turn in messages for part in turn.get("content") or () if is_image_part(part)]
    placeholders = [part for part in parts if "image" not in part]
    if len(placeholders) != len(given):
        raise DataError(
            f"has {_count(len(given))} in its column and {len(placeholders)} placeholders in its turns. Write one "
            f"placeholder for each, `{PLACEHOLDER}` in a text or a part `{{type: image}}`, or none: they are then put "
            f"before the first question."
        )
    indices = [part.get("index", number) for number, part in enumerate(placeholders)]
    if sorted(indices) != list(range(len(given))):
        raise DataError(
            f"has image parts with the `index` {indices}, which do not refer to each of its images exactly once."
        )
    ordered = iter([given[index] for index in indices])
    return [part["image"] if "image" in part else next(ordered) for part in parts]


def _text(turn: Turn) -> str:
    content = turn.get("content")
    return content if isinstance(content, str) else ""


def _count(number: int) -> str:
    return f"{number} image{'' if number == 1 else 's'}"
