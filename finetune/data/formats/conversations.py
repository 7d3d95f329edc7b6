"""Conversations of a row: a prompt and its answers, with the row's system message; and the images in their turns."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from finetune.data.formats.columns import NOTES, Columns
from finetune.data.rows import Part, Row, Turn, has_images, is_image_part
from finetune.data.turns import read_turns
from finetune.errors import DataError

OWN_PROMPT = "an answer begins with a question"
"""The note on a row whose answer begins with a question, or a system message, that is not its prompt."""


def read_exchange(
    columns: Columns, prompt: Sequence[Turn], names: Sequence[str], *, with_images: bool = False
) -> tuple[list[Turn], list[list[Turn]], Row]:
    """Return the prompt, the answers to it in the columns of these names, and what is noted about them.

    An answer may begin with the prompt and is then the rest: turns after a system message if there is one; of
    a pair also texts. The common start of two conversations that begin with the prompt is the prompt, as in TRL.
    """
    sides = [turns_of(columns, name, by="assistant", with_images=with_images) for name in names]
    starts = [_end_of_prompt(side, prompt) if prompt else 0 for side in sides]  # the number of turns of the prompt
    if len(sides) == 2 and (not prompt or all(starts)):
        pairs = zip(*(side[:-1] for side in sides), strict=False)
        num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        starts = [num_shared] * 2 if num_shared >= max(starts) else starts
    answers = [side[start:] for side, start in zip(sides, starts, strict=True)]
    if any(starts):
        prompt = max((side[:start] for side, start in zip(sides, starts, strict=True)), key=len)
    elif len(sides) == 2 and len(prompt) == 1:
        rests = [_rest(answer[0].get("content"), prompt[0]["content"]) for answer in answers]
        if all(rests):
            answers = [[{**turns[0], "content": rest}, *turns[1:]] for turns, rest in zip(answers, rests, strict=True)]
    has_own = any(_begins_otherwise(answer[0], prompt) for answer in answers)
    return with_system(prompt, columns), answers, {NOTES: (OWN_PROMPT,)} if has_own else {}


def _end_of_prompt(side: Sequence[Turn], prompt: Sequence[Turn]) -> int:
    """Return the number of turns at the start of the conversation that are the prompt, with its system message."""
    for first in (0, 1):
        own = side[first : first + len(prompt)]
        is_prompt = [_content(turn) for turn in own] == [_content(turn) for turn in prompt]
        if is_prompt and first + len(prompt) < len(side) and all(turn["role"] in _RULES for turn in side[:first]):
            return first + len(prompt)
    return 0


_RULES = ("system", "developer")


def _content(turn: Turn) -> tuple[Any, ...]:
    return turn["role"], turn.get("content"), turn.get("tool_calls")


def _rest(text: Any, prompt: Any) -> str:
    """Return the rest of an answer's text that begins with the prompt; empty if it does not, or has no rest.

    An answer may well begin with the word that it answers: a prompt of one word must be followed by a new line.
    """
    if not isinstance(text, str) or not isinstance(prompt, str) or not text.startswith(prompt):
        return ""
    rest = text[len(prompt) :]
    is_edge = len(prompt.split()) > 1 and not (prompt[-1] + rest[:1]).isalnum()
    return rest.lstrip() if is_edge or rest[:1] == "\n" else ""


def _begins_otherwise(answer: Turn, prompt: Sequence[Turn]) -> bool:
    """Return whether an answer begins with a turn of the user, or with about the text of a prompt of several words."""
    if not prompt or answer["role"] in ("user", *_RULES):
        return bool(prompt)
    text, question = answer.get("content"), prompt[-1].get("content")
    if not isinstance(text, str) or not isinstance(question, str) or len(question.split()) < 2:
        return False
    start, compared = ("".join(each.split()).casefold() for each in (text[: 2 * len(question) + 1], question))
    return start != compared and start.startswith(compared)


def turns_of(columns: Columns, column: str, *, by: str, with_images: bool = False) -> list[Turn]:
    """Return the turns of a column: the text of one turn, one turn, or a list of turns."""
    value = columns.turns(column)
    if isinstance(value, list | dict):
        return read_turns(value, title=columns.title(column), with_images=with_images)
    return [{"role": by, "content": columns.text(column)}]


def with_system(turns: Sequence[Turn], columns: Columns) -> list[Turn]:
    """Return the turns after the row's system message; raises DataError if they begin with another one."""
    value = columns.optional_text("system")
    if not value:
        return list(turns)
    if turns and turns[0]["role"] in _RULES:
        if turns[0].get("content") == value:
            return list(turns)
        raise DataError(
            f"has a system message in {columns.title('system')} and another one in its turns. Remove one of them, or "
            f"map another column to `system`."
        )
    return [{"role": "system", "content": value}, *turns]


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
