"""Reasoning in answers: what a row has of it, and where a rendered answer says something after it."""

from collections.abc import Callable
from dataclasses import dataclass

from finetune.data.turns import Turn

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names that reasoning is given under."""

INLINE = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))
"""What encloses reasoning that is written into the content; up to two line ends behind it belong to it."""

RenderAnswer = Callable[[Turn], str]
"""From an answer to its rendering, from where a model would begin to write it."""


def split_reasoning(turn: Turn) -> tuple[str, str]:
    """Return the reasoning of a turn and the rest of its content, both without whitespace around; empty where none."""
    content = turn.get("content")
    said = content.strip() if isinstance(content, str) else ""
    for name in REASONING:
        reasoning = turn.get(name)
        if isinstance(reasoning, str) and reasoning.strip():
            return reasoning.strip(), said
    for opening, closing in INLINE:
        if closing in said:  # a prompt may hold the opening
            before, _, behind = said.partition(closing)
            return before.strip().removeprefix(opening).strip(), behind.strip()
    return "", said


@dataclass(frozen=True)
class ReasoningMarks:
    """What a chat template writes around reasoning, and what in its place where there is none.

    Of each there may be several: before content and before a call of a tool. Longer ones stand first.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    absent: tuple[str, ...]

    def end_in(self, text: str, turn: Turn, *, start: int, end: int) -> int | None:
        """Return where the reasoning of an answer between two places of the text ends, its markers included.

        `start` where there is none. None where what stands around it is not what the template is known to write.
        """
        reasoning, _ = split_reasoning(turn)
        place = text.find(reasoning, start, end) if reasoning else -1
        found = None if place < 0 else self._end_of(reasoning, text, start=start, place=place, end=end)
        if found is not None:
            return found
        absent = next((start + len(each) for each in self.absent if text.startswith(each, start)), None)
        return start if absent is None and place < 0 else absent

    def _end_of(self, reasoning: str, text: str, *, start: int, place: int, end: int) -> int | None:
        if text[start:place].strip() not in {each.strip() for each in self.openings}:
            return None
        behind = place + len(reasoning)
        mark = behind + len(text[behind:end]) - len(text[behind:end].lstrip())
        for closing in self.closings:
            if text.startswith(closing.strip(), mark):
                mark += len(closing.strip())
                return mark + len(_common_beginning(text[mark:end], _whitespace_behind(closing)))
        return None


def find_marks(render_answer: RenderAnswer) -> ReasoningMarks:
    """Return what the template writes around reasoning, found by rendering four small answers.

    A template that renders no reasoning has no marks but those that content may hold.
    """
    answers = {(has, calls): render_answer(_answer(has, calls)) for has in (True, False) for calls in (True, False)}
    openings, closings, absent = {""}, set(), set()
    said, called = (answers[True, calls].partition(_THOUGHT) for calls in (False, True))
    openings |= {before for before, found, _ in (said, called) if found}
    if said[1]:
        before_content = _before_content(said[2])
        closings |= {before_content, _common_beginning(before_content, called[2])}
    elif called[1]:
        closings.add(_inserted(called[2], answers[False, True]))
    lead = _before_content(answers[False, False])
    if said[1] or called[1]:
        absent |= {lead, _common_beginning(lead, answers[False, True])}
    inline_openings = {before + opening for before in ("", lead, *absent) for opening, _ in INLINE}
    inline_closings = {f"{closing}\n\n" for _, closing in INLINE}
    return ReasoningMarks(
        tuple(_longest_first(openings | inline_openings)),
        tuple(each for each in (*_longest_first(closings), *_longest_first(inline_closings)) if each.strip()),
        tuple(each for each in _longest_first(absent) if each.strip()),
    )


def _before_content(rendered: str) -> str:
    before, found, _ = rendered.partition(_SAID)
    return before if found else ""


_THOUGHT, _SAID = "Xyzzy plugh", "Fee fie foe"
_CALL = {"id": "call00001", "type": "function", "function": {"name": "double", "arguments": {"a": 2}}}


def _answer(has_reasoning: bool, calls: bool) -> Turn:
    turn: dict[str, object] = {"role": "assistant", "content": "" if calls else _SAID}
    turn |= {"reasoning_content": _THOUGHT} if has_reasoning else {}
    return turn | ({"tool_calls": [_CALL]} if calls else {})


def _inserted(longer: str, shorter: str) -> str:
    """Return the beginning of the first text without what both end with."""
    same = len(_common_beginning(longer[::-1], shorter[::-1]))
    return longer[: len(longer) - same]


def _common_beginning(one: str, other: str) -> str:
    same = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return one[: min(len(one), len(other)) if same is None else same]


def _whitespace_behind(mark: str) -> str:
    return mark[len(mark.rstrip()) :]


def _longest_first(marks: set[str]) -> list[str]:
    return sorted(marks, key=lambda mark: (-len(mark), mark))
