"""Find the characters of a rendered conversation that are targets: answers, with or without their reasoning."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from finetune.data.features import NOTHING_FOUND, Findings
from finetune.data.rows import Turn
from finetune.data.templates.chat_template import EndOfTurn, after_content
from finetune.data.templates.rendering import Arguments, Rendering, Tools, render_chat
from finetune.errors import DataError
from finetune.registry.turns import WEIGHTS, standard_word

OTHER_TEMPLATES = (
    "`chatml` or to a Jinja file that marks the answers with {% generation %} (the `_training` variants that TRL ships "
    "do)"
)
_REMEDY = (
    "Set data.train_on: each_assistant, which makes each answer a sample of its own, rendered as the model will be "
    "asked; or last_assistant, which trains on the last answer alone; or data.chat_template to "
    f"{OTHER_TEMPLATES}."
)
_REMEDY_OF_GENERATION_PROMPT = (
    "The prompt at inference would differ from training. Give the turn the content that the generation prompt opens "
    "(such as its reasoning_content); or pass the argument that changes the prompt (data.chat_template_arguments: "
    f"{{enable_thinking: ...}}); or set data.chat_template to {OTHER_TEMPLATES}."
)

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
        if position >= 0 and text[start:position].strip() in {opening.strip() for opening in self.openings}:
            after = text[position + len(reasoning) : end]
            closing_start = end - len(after.lstrip())
            for closing in self.closings:
                if text.startswith(closing.strip(), closing_start):
                    mark_end = closing_start + len(closing.strip())
                    return mark_end + len(_common_prefix(text[mark_end:end], closing[len(closing.rstrip()) :]))
        absent = next((start + len(mark) for mark in self.absent if text.startswith(mark, start)), None)
        return start if absent is None and position < 0 else absent


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
    differs = (offset for offset, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(differs, min(len(one), len(other)))]


def _longest_first(marks: set[str]) -> list[str]:
    return sorted(marks, key=lambda mark: (-len(mark), mark))


TrainOn = Literal["assistant", "last_assistant", "each_assistant", "all", "per_message"]
LAST_ALONE: tuple[TrainOn, ...] = ("last_assistant", "each_assistant")
"""Modes in which only the last answer is a target; `each_assistant` makes a conversation of every answer of a row."""


@dataclass(frozen=True)
class Span:
    """A range of characters that are targets, and a description of it for messages."""

    start: int
    end: int
    what: str


@dataclass(frozen=True)
class RenderedChat:
    """A rendered conversation and the spans of it that are targets."""

    text: str
    spans: tuple[Span, ...]
    may_be_open: bool  # append end-of-sequence to the last span unless a special token ends it
    has_control_names: bool = field(default=False, kw_only=True)  # the text contains placeholders: see control_tokens
    findings: Findings = field(default=NOTHING_FOUND, kw_only=True)


@dataclass(frozen=True)
class TargetFinder:
    """Finds the targets of conversations; one instance serves a whole run."""

    tokenizer: PreTrainedTokenizerBase
    end_of_turn: EndOfTurn
    train_on: TrainOn = "assistant"
    template: str = "the tokenizer's own"
    train_on_reasoning: bool = True
    chooses_turns: bool = True  # the task reads `data.train_on`
    _marks: dict[str, ReasoningMarks] = field(default_factory=dict, compare=False, repr=False)

    def rendered_chat(
        self,
        turns: Sequence[Turn],
        tools: Tools | None = None,
        *,
        arguments: Arguments | None = None,
        num_context_turns: int = 0,
    ) -> RenderedChat | None:
        """Return the conversation as text with the spans that are targets; None where there are none.

        Assistant turns among the first `num_context_turns` are part of the prompt, not targets. Raises DataError if
        the template rejects the turns, or if the rendering of a prefix of the conversation is not a prefix of the
        rendering of the whole.
        """
        targets = target_turns(turns, self.train_on, num_context_turns=num_context_turns)
        if not targets:
            return None
        if self.train_on == "all":
            text = render_chat(self.tokenizer, turns, tools=tools, arguments=arguments).text
            spans = (Span(0, len(text.rstrip()), "the conversation"),)
            return RenderedChat(text, spans, may_be_open=True)
        if self.train_on in LAST_ALONE:
            turns = turns[: targets[-1] + 1]  # later turns have no targets and may change how the answer is rendered
        return _Conversation(self, turns, tools, arguments).rendered_chat(targets)

    def reasoning_marks(self, arguments: Arguments | None) -> ReasoningMarks:
        """Return the marks that the template writes around reasoning, cached per arguments."""
        key = json.dumps(arguments, sort_keys=True, default=str)
        if key not in self._marks:
            self._marks[key] = find_marks(lambda turn: self._rendered_answer(turn, arguments))
        return self._marks[key]

    def _rendered_answer(self, turn: Turn, arguments: Arguments | None) -> str:
        train_on = self.train_on if self.train_on in LAST_ALONE else "last_assistant"
        plain = replace(self, train_on=train_on, train_on_reasoning=True)
        try:
            chat = plain.rendered_chat([{"role": "user", "content": "a"}, turn], arguments=arguments)
        except DataError:
            return ""
        return "" if chat is None else chat.text[chat.spans[-1].start :]


def target_turns(turns: Sequence[Turn], train_on: TrainOn, *, num_context_turns: int = 0) -> list[int]:
    """Return the indices of the turns that are targets.

    Raises DataError for a `weight`, by any of its names, that would be ignored or cannot be read, and for an answer
    without a prompt.
    """
    weights = [_weight(number, turn, train_on) for number, turn in enumerate(turns, start=1)]
    if train_on == "all":
        return list(range(len(turns)))
    if train_on == "per_message":
        is_answer = [turn["role"] == "assistant" for turn in turns]
        chosen = [usual if weight is None else weight for usual, weight in zip(is_answer, weights, strict=True)]
        targets = [index for index, is_chosen in enumerate(chosen) if is_chosen]
    else:
        answers = (index for index, turn in enumerate(turns) if turn["role"] == "assistant")
        targets = [index for index in answers if index >= num_context_turns]
        targets = targets[-1:] if train_on in LAST_ALONE else targets
    if targets and targets[0] == 0 and turns[0]["role"] == "assistant":
        raise DataError("the conversation starts with an assistant turn: there is no prompt before the answer.")
    return targets


def _weight(number: int, turn: Turn, train_on: TrainOn) -> bool | None:
    """Return whether the turn says that it is a target, None if it does not say; raises DataError as `target_turns`."""
    weights: dict[str, bool] = {}
    for name, value in turn.items():
        if value is None or (word := standard_word(name)) not in WEIGHTS:
            continue
        is_in_loss = WEIGHTS[word]  # the meaning of 1
        if is_in_loss is None:
            raise DataError(
                f"turn {number} has `{name}`, whose meaning differs between tools. Write `weight: 0` (not trained on) "
                "or `weight: 1`, and data.train_on: per_message."
            )
        if train_on != "per_message":
            raise DataError(
                f"turn {number} has a `{name}`, which `data.train_on: {train_on}` does not read. "
                "Set data.train_on: per_message, which tasks with that key read, or leave it out of the rows."
            )
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(f"turn {number} has `{name}` {value!r}: it must be 1 or 0, true or false.")
        weights[name] = bool(value) is is_in_loss
    if len(set(weights.values())) > 1:
        names = " and ".join(f"`{name}`" for name in weights)
        raise DataError(f"turn {number} has {names}, which contradict each other. Remove one of them.")
    return next(iter(weights.values()), None)


@dataclass(frozen=True)
class _Conversation:
    """One conversation, whose prefixes are rendered and compared with the whole."""

    finder: TargetFinder
    turns: Sequence[Turn]
    tools: Tools | None
    arguments: Arguments | None = None
    given: Rendering | None = None  # the rendering of the whole, if it was assembled rather than rendered

    def rendered_chat(self, targets: Sequence[int]) -> RenderedChat:
        """Return the spans that the template marks; without marks, the spans found by rendering prefixes."""
        if self.finder.train_on == "each_assistant":
            return self._with_inference_prompt()._chat([len(self.turns) - 1], marked=None)
        return self._chat(targets, marked=self._marked(targets))

    def _with_inference_prompt(self) -> "_Conversation":
        """Return the conversation whose last answer follows the prompt exactly as rendered at inference.

        Raises DataError if the answer, rendered as the last turn, does not start with the end of the prompt.
        """
        index = len(self.turns) - 1
        prompt = self._render(index, generation_prompt=True).text
        if self.whole.text.startswith(prompt):
            return self
        generation_prompt = prompt.removeprefix(self._render(index).text)
        other = render_chat(
            self.finder.tokenizer,
            [*self.turns[:index], {"role": "assistant", "content": _ANOTHER}],
            tools=self.tools,
            arguments=self.arguments,
        ).text
        end = len(_common_prefix(self.whole.text, other))
        start = self.whole.text.rfind(generation_prompt, 0, end)
        if generation_prompt == prompt or start < 0:
            raise self._difference(prompt, what=f"the prompt of turn {index + 1}", remedy=_REMEDY_OF_GENERATION_PROMPT)
        return replace(self, given=Rendering(prompt + self.whole.text[start + len(generation_prompt) :]))

    def _chat(self, targets: Sequence[int], *, marked: list[Span] | None) -> RenderedChat:
        spans = [self._answer(index) for index in targets] if marked is None else marked
        text, is_aligned, is_dropped = self.whole.text, len(spans) == len(targets), False
        for number, index in enumerate(targets):  # is the reasoning of a target turn missing from its rendering?
            reasoning, _ = split_reasoning(self.turns[index])
            start, end = (spans[number].start, spans[number].end) if is_aligned else (0, len(text))
            is_dropped |= bool(reasoning) and text.find(reasoning, start, end) < 0
        if not self.finder.train_on_reasoning:
            spans = self._without_reasoning(spans, targets)
        is_last = targets[-1] == len(self.turns) - 1
        ends, num_empty = {"", self.finder.end_of_turn.text, *self.finder.end_of_turn.special}, 0
        for number, index in enumerate(targets):
            turn = self.turns[index]
            is_end = is_aligned and text[spans[number].start : spans[number].end].strip() in ends
            is_empty = is_end or not any((*split_reasoning(turn), text_of(turn).strip(), turn.get("tool_calls")))
            num_empty += turn["role"] == "assistant" and is_empty
        findings = Findings(frozenset({"dropped_reasoning_rows"} if is_dropped else ()), num_empty)
        return RenderedChat(text, tuple(spans), may_be_open=is_last, findings=findings)

    def _without_reasoning(self, spans: Sequence[Span], targets: Sequence[int]) -> list[Span]:
        """Return the spans without the reasoning at the start of answers; raises DataError if it cannot be located."""
        if len(spans) != len(targets):
            raise DataError(
                f"the chat template ({self.finder.template}) marks {len(spans)} pieces of {len(targets)} answers, so "
                "their reasoning cannot be located. Set data.train_on_reasoning: true."
            )
        marks, trimmed = self.finder.reasoning_marks(self.arguments), []
        for span, index in zip(spans, targets, strict=True):
            turn, start = self.turns[index], span.start
            is_answer = turn["role"] == "assistant"
            end = marks.end_in(self.whole.text, turn, start=start, end=span.end) if is_answer else start
            if end is None:
                beginning = self.whole.text[span.start : span.start + 60]
                raise DataError(
                    f"the end of the reasoning of turn {index + 1} cannot be located in the output of the chat "
                    f"template ({self.finder.template}), which starts with {beginning!r}. Set "
                    "data.train_on_reasoning: true, or give the reasoning as `reasoning_content`."
                )
            trimmed.append(replace(span, start=min(end, span.end)))
        return trimmed

    @cached_property
    def whole(self) -> Rendering:
        return self.given or self._render(len(self.turns))

    def _marked(self, targets: Sequence[int]) -> list[Span] | None:
        """Return the marked spans of the turns, extended through the end of turn; None if ambiguous."""
        final = self.finder.end_of_turn.final  # the model is not asked for text after the end of its turn
        marked = [(start, end) for start, end in self.whole.marked if not final or self.whole.text[start:end] != final]
        answers = [index for index, turn in enumerate(self.turns) if turn["role"] == "assistant"]
        if len(marked) == len(answers):
            chosen = dict(zip(answers, marked, strict=True))
            return [self._through_end(*chosen[index]) if index in chosen else self._answer(index) for index in targets]
        if marked and answers == list(targets):
            return [self._through_end(start, end) for start, end in marked]
        return None

    def _through_end(self, start: int, end: int) -> Span:
        end = self.finder.end_of_turn.end_in(self.whole.text, start=start, end=end)
        return Span(start, end, "the text that the template marks with {% generation %}")

    def _answer(self, index: int) -> Span:
        """Return the span of the turn, from after the generation prompt through the end of turn."""
        turn, number = self.turns[index], index + 1
        if turn["role"] == "assistant":
            start = self._end_of_beginning(index, generation_prompt=True, what=f"the prompt of turn {number}")
        else:
            start = self._end_of_beginning(index, generation_prompt=False, what=f"turn {index}") if index else 0
        what = f"turn {number}"
        end = self._end_of_beginning(number, generation_prompt=False, what=what)
        is_ended = after_content(self.whole.text[start:end], content=text_of(turn)) != ""
        if is_ended:
            end = self.finder.end_of_turn.without_rest(self.whole.text, start=start, end=end)
        return Span(start, max(start, end), what)

    def _end_of_beginning(self, num_turns: int, *, generation_prompt: bool, what: str) -> int:
        """Return the length of the rendered turns; raises DataError if they are not a prefix of the whole."""
        if num_turns == len(self.turns) and not generation_prompt:
            return len(self.whole.text)
        beginning = self._render(num_turns, generation_prompt=generation_prompt).text
        if self.whole.text.startswith(beginning):
            return len(beginning)
        without_end = self.finder.end_of_turn.without_final(beginning)
        if not generation_prompt and without_end is not None and self.whole.text.startswith(without_end):
            return len(without_end)
        is_last = generation_prompt and num_turns == len(self.turns) - 1
        is_generation_prompt = is_last and self.whole.text.startswith(self._render(num_turns).text)
        remedy = _REMEDY if self.finder.chooses_turns else f"Set data.chat_template to {OTHER_TEMPLATES}."
        raise self._difference(
            beginning, what=what, remedy=_REMEDY_OF_GENERATION_PROMPT if is_generation_prompt else remedy
        )

    def _difference(self, beginning: str, *, what: str, remedy: str) -> DataError:
        alone, within = first_difference(beginning, self.whole.text)
        return DataError(
            f"the chat template ({self.finder.template}) renders {what} differently when the conversation stops there "
            f"({alone}) and when it continues ({within}), so the targets cannot be determined. {remedy}"
        )

    def _render(self, num_turns: int, *, generation_prompt: bool = False) -> Rendering:
        return render_chat(
            self.finder.tokenizer,
            self.turns[:num_turns],
            tools=self.tools,
            arguments=self.arguments,
            add_generation_prompt=generation_prompt,
        )


_ANOTHER = "Xyzzy"


def first_difference(one: str, other: str) -> tuple[str, str]:
    """Return short excerpts of both texts around the first character in which they differ."""
    offset = len(_common_prefix(one, other))
    start = max(0, offset - 16)
    texts = [
        repr(("..." if start else "") + text[start : offset + 32] + ("..." if offset + 32 < len(text) else ""))
        for text in (one, other)
    ]
    return texts[0], texts[1]


def text_of(turn: Mapping[str, Any]) -> str:
    """Return the content of the turn as one text; of a list of parts, the last text part."""
    content = turn.get("content")
    if isinstance(content, str):
        return content
    parts = [part["text"] for part in content or () if isinstance(part, Mapping) and "text" in part]
    return str(parts[-1]) if parts else ""
