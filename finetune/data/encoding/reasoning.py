"""Reasoning in answers: the reasoning of a row, and where it ends in a rendered answer."""

from collections.abc import Callable
from dataclasses import dataclass

from finetune.data.turns import Turn

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The field names of reasoning in a turn."""

INLINE = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))
"""The tags around reasoning inside the content; up to two newlines after the closing tag are part of it."""

RenderAnswer = Callable[[Turn], str]
"""Renders an answer and returns the text from the end of the prompt on."""


def split_reasoning(turn: Turn) -> tuple[str, str]:
    """Return the reasoning of a turn and the rest of its content, both stripped; empty strings if absent."""
    content = turn.get("content")
    text = content.strip() if isinstance(content, str) else ""
    for name in REASONING:
        reasoning = turn.get(name)
        if isinstance(reasoning, str) and reasoning.strip():
            return reasoning.strip(), text
    for opening, closing in INLINE:
        if closing in text:  # the prompt may contain the opening tag
            before, _, after = text.partition(closing)
            return before.strip().removeprefix(opening).strip(), after.strip()
    return "", text


@dataclass(frozen=True)
class ReasoningMarks:
    """The text that a chat template writes around reasoning, and in place of absent reasoning.

    There may be several variants: before content and before a tool call. Longer ones come first.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    absent: tuple[str, ...]

    def end_in(self, text: str, turn: Turn, *, start: int, end: int) -> int | None:
        """Return where the reasoning of the answer `text[start:end]` ends, including its marks.

        Returns `start` if there is no reasoning, and None if the text around it is not one of the known marks.
        """
        reasoning, _ = split_reasoning(turn)
        position = text.find(reasoning, start, end) if reasoning else -1
        mark_end = None if position < 0 else self._end_of(reasoning, text, start=start, position=position, end=end)
        if mark_end is not None:
            return mark_end
        absent = next((start + len(mark) for mark in self.absent if text.startswith(mark, start)), None)
        return start if absent is None and position < 0 else absent

    def _end_of(self, reasoning: str, text: str, *, start: int, position: int, end: int) -> int | None:
        if text[start:position].strip() not in {opening.strip() for opening in self.openings}:
            return None
        reasoning_end = position + len(reasoning)
        closing_start = reasoning_end + len(text[reasoning_end:end]) - len(text[reasoning_end:end].lstrip())
        for closing in self.closings:
            if text.startswith(closing.strip(), closing_start):
                closing_start += len(closing.strip())
                return closing_start + len(_common_prefix(text[closing_start:end], closing[len(closing.rstrip()) :]))
        return None


def find_marks(render_answer: RenderAnswer) -> ReasoningMarks:
    """Return the marks that the template writes around reasoning, detected by rendering four small answers.

    A template that does not render reasoning has only the inline marks that content may contain.
    """
    answers = {(has, calls): render_answer(_answer(has, calls)) for has in (True, False) for calls in (True, False)}
    openings, closings, absent = {""}, set(), set()
    with_content, with_call = (answers[True, calls].partition(_THOUGHT) for calls in (False, True))
    openings |= {before for before, is_found, _ in (with_content, with_call) if is_found}
    if with_content[1]:
        before_content = _before_content(with_content[2])
        closings |= {before_content, _common_prefix(before_content, with_call[2])}
    elif with_call[1]:
        longer = with_call[2]  # without the suffix that it shares with the answer that has no reasoning
        same = len(_common_prefix(longer[::-1], answers[False, True][::-1]))
        closings.add(longer[: len(longer) - same])
    prefix = _before_content(answers[False, False])
    if with_content[1] or with_call[1]:
        absent |= {prefix, _common_prefix(prefix, answers[False, True])}
    inline_openings = {before + opening for before in ("", prefix, *absent) for opening, _ in INLINE}
    inline_closings = {f"{closing}\n\n" for _, closing in INLINE}
    return ReasoningMarks(
        tuple(_longest_first(openings | inline_openings)),
        tuple(mark for mark in (*_longest_first(closings), *_longest_first(inline_closings)) if mark.strip()),
        tuple(mark for mark in _longest_first(absent) if mark.strip()),
    )


def _before_content(rendered: str) -> str:
    before, is_found, _ = rendered.partition(_CONTENT)
    return before if is_found else ""


_THOUGHT, _CONTENT = "Xyzzy plugh", "Fee fie foe"
_CALL = {"id": "call00001", "type": "function", "function": {"name": "double", "arguments": {"a": 2}}}


def _answer(has_reasoning: bool, calls: bool) -> Turn:
    turn: dict[str, object] = {"role": "assistant", "content": "" if calls else _CONTENT}
    turn |= {"reasoning_content": _THOUGHT} if has_reasoning else {}
    return turn | ({"tool_calls": [_CALL]} if calls else {})


def _common_prefix(one: str, other: str) -> str:
    length = next((offset for offset, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return one[: min(len(one), len(other)) if length is None else length]


def _longest_first(marks: set[str]) -> list[str]:
    return sorted(marks, key=lambda mark: (-len(mark), mark))
