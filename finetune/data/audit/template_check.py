"""What a chat template does with a tokenizer: found by encoding small conversations, once for a prepared set."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.config.sections.data import DataSection
from finetune.data.encoding.conversation import ConversationEncoder
from finetune.data.encoding.target_spans import first_difference
from finetune.data.features import Features, Outcome
from finetune.data.rows import Row
from finetune.data.templates.arguments import arguments_of
from finetune.data.templates.chat_template import EndOfTurn, end_of_turn, is_special, tokenize
from finetune.data.templates.rendering import has_markers, render
from finetune.errors import DataError
from finetune.runtime.text.terminal import format_json

ASKED = {"role": "user", "content": "What is two and two?"}
ANSWERED = {"role": "assistant", "content": "Four."}
AGAIN = ({"role": "user", "content": "And three and three?"}, {"role": "assistant", "content": "Six."})
SYSTEM = {"role": "system", "content": "Be brief."}
ARGUMENTS = {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}, "required": ["a"]}
TOOLS = (
    {"type": "function", "function": {"name": "double", "description": "Doubles a number.", "parameters": ARGUMENTS}},
)
CALL = {"id": "call00001", "type": "function", "function": {"name": "double", "arguments": {"a": 2}}}
CALLED = (
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "double", "tool_call_id": "call00001", "content": "4"},
)
CASES: Mapping[str, Row] = {
    "one answer": {"messages": [ASKED, ANSWERED]},
    "several answers": {"messages": [ASKED, ANSWERED, *AGAIN]},
    "system message": {"messages": [SYSTEM, ASKED, ANSWERED]},
    "tools": {"messages": [ASKED, *CALLED, ANSWERED], "tools": list(TOOLS)},
}
"""Conversations that a template may be able to render, by what is asked of it."""


@dataclass(frozen=True)
class PromptMismatch:
    """Where the prompt that a trained model is given is not the beginning of what it was trained on."""

    case: str
    prompt: str  # an excerpt from the first difference on
    trained: str
    prompt_tokens: tuple[str, ...]
    trained_tokens: tuple[str, ...]


@dataclass(frozen=True)
class TemplateCheck:
    """What was found for a tokenizer and its chat template; plain values, for JSON."""

    template: str
    targets_by: str  # `markers` of the template, or `renderings` of beginnings
    end_of_turn: str  # empty: the template writes none
    end_of_turn_tokens: tuple[int, ...]
    is_end_learnt: bool  # the last target of an answer is what ends it; False where there is no target
    begins_with: str  # the beginning-of-sequence that the template writes; empty: it writes none
    learnt: tuple[str, ...]  # the cases that have targets
    refused: Mapping[str, str]  # from the others to the reason
    differences: tuple[PromptMismatch, ...]
    notes: tuple[str, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)  # that every conversation is rendered with

    def lines(self) -> Iterator[str]:
        """Yield the findings as text for a terminal."""
        how = "its {% generation %} markers" if self.targets_by == "markers" else "rendering beginnings"
        yield f"chat template {self.template}: targets are found by {how}"
        if self.arguments:
            named = ", ".join(f"{name}: {format_json(value)}" for name, value in self.arguments.items())
            yield f"  rendered with {named}"
        yield f"  trainable: {', '.join(self.learnt) or 'nothing'}"
        yield from (f"  not trainable: {case}: {reason}" for case, reason in self.refused.items())
        if self.learnt:
            yield f"  end of turn: {self._end()}, {'a target' if self.is_end_learnt else 'NOT a target'}"
            yield f"  beginning of sequence: {self.begins_with or 'not written'}"
        for each in self.differences:
            yield f"  {each.case}: the prompt at inference is {each.prompt} but the model was trained on {each.trained}"
            yield f"    tokens {list(each.prompt_tokens)} against {list(each.trained_tokens)}"
        if self.learnt and not self.differences:
            yield "  prompts at inference are the beginnings of what is trained on"
        yield from (f"  {note}" for note in self.notes)

    def _end(self) -> str:
        if not self.end_of_turn:
            return "none of its own, so end-of-sequence follows the last answer"
        num_tokens = len(self.end_of_turn_tokens)
        return f"{self.end_of_turn!r}, " + ("one token" if num_tokens == 1 else f"{num_tokens} tokens of plain text")


def check_template(tokenizer: PreTrainedTokenizerBase, section: DataSection) -> TemplateCheck:
    """Return what the tokenizer's chat template does with small conversations under the section's `train_on`."""
    encoder = ConversationEncoder(
        tokenizer,
        train_on=section.train_on,
        template=section.chat_template,
        train_on_reasoning=section.train_on_reasoning,
    )
    rows = _rows_for(encoder)
    outcomes = {case: _last(encoder([row])[0]) for case, row in rows.items()}
    learnt = {case: each for case, each in outcomes.items() if isinstance(each, Features)}
    found = [_Sample(case, rows[case], each, tokenizer) for case, each in learnt.items()]
    ending = end_of_turn(tokenizer)
    return TemplateCheck(
        template=f"`{section.chat_template}`" if section.chat_template else "of the tokenizer",
        targets_by="markers" if has_markers(_template(tokenizer)) else "renderings",
        end_of_turn=ending.text,
        end_of_turn_tokens=ending.tokens,
        is_end_learnt=bool(found) and all(each.trains_on_end(ending) for each in found),
        begins_with=str(tokenizer.bos_token) if found and found[0].begins_with(tokenizer.bos_token_id) else "",
        learnt=tuple(learnt),
        refused={case: _reason(each) for case, each in outcomes.items() if case not in learnt},
        differences=tuple(difference for each in found for difference in each.differences()),
        notes=tuple(_notes(found, ending, tokenizer)) + (_WANTS_PARTS if rows is not CASES else ()),
        arguments=dict(arguments_of(tokenizer)),
    )


def _last(outcome: Outcome) -> Features | DataError | None:
    """Return the sample of the whole conversation, where each answer is one."""
    return outcome[-1] if isinstance(outcome, tuple) else outcome


_WANTS_PARTS = ('content has to be a list of parts: [{"type": "text", "text": "..."}]',)


def _rows_for(encoder: ConversationEncoder) -> Mapping[str, Row]:
    """Return the cases; with lists of parts as content, where the template wants those."""
    in_parts = {case: _in_parts(row) for case, row in CASES.items()}
    as_text, as_parts = (_last(encoder([rows["one answer"]])[0]) for rows in (CASES, in_parts))
    return in_parts if isinstance(as_text, DataError) and isinstance(as_parts, Features) else CASES


def _in_parts(row: Row) -> Row:
    turns = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in row["messages"]]
    return {**row, "messages": turns}


def _reason(outcome: Outcome) -> str:
    """Return the reason without the advice, which is for rows."""
    if outcome is None:
        return "it has no target"
    return str(outcome).partition(" Set ")[0].partition(" The prompt at inference ")[0]


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.get_chat_template())


@dataclass(frozen=True)
class _Sample:
    """A small conversation as it is trained on."""

    case: str
    row: Row
    features: Features
    tokenizer: PreTrainedTokenizerBase

    @cached_property
    def ids(self) -> list[int]:
        return [int(token) for token in self.features.arrays["input_ids"]]

    @cached_property
    def prompt(self) -> list[int]:
        """Return the tokens that a model is asked with, made as those who use it make them."""
        turns, tools = self.row["messages"][:-1], self.row.get("tools")
        return tokenize(self.tokenizer, render(self.tokenizer, turns, tools=tools, add_generation_prompt=True).text)

    def begins_with(self, token: int | None) -> bool:
        return self.ids[0] == token

    def trains_on_end(self, ending: EndOfTurn) -> bool:
        """Tell whether the last target is a token that ends an answer."""
        last = self.ids[int(np.flatnonzero(self.features.arrays["is_target"])[-1])]
        return last in ending.tokens[-1:] or is_special(self.tokenizer, last)

    def differences(self) -> Iterator[PromptMismatch]:
        """Yield where the prompt is not the beginning of the sample."""
        place = next((i for i, token in enumerate(self.prompt) if self.ids[i : i + 1] != [token]), None)
        if place is not None:
            texts = first_difference(self.tokenizer.decode(self.prompt), self.tokenizer.decode(self.ids))
            around = slice(max(0, place - 2), place + 6)
            tokens = (tuple(self.tokenizer.convert_ids_to_tokens(ids[around])) for ids in (self.prompt, self.ids))
            yield PromptMismatch(self.case, *texts, *tokens)

    def notes(self) -> Iterator[str]:
        """Yield what lies between the end of the prompt and the first target."""
        begin, end = int(np.flatnonzero(self.features.arrays["is_target"])[0]), len(self.prompt)
        between = repr(self.tokenizer.decode(self.ids[min(begin, end) : max(begin, end)]))
        if self.ids[:end] != self.prompt or begin == 1:  # reported as a difference; all tokens are targets
            return
        if begin < end:
            yield f"{between}, the end of the prompt, is a target, too: the markers begin before it"
        if begin > end:
            yield f"{between}, which a model has to write after the prompt, is not a target: the markers begin after it"


def _notes(found: Sequence[_Sample], ending: EndOfTurn, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    for first in found[:1]:
        yield from first.notes()
        bos = tokenizer.bos_token_id
        if bos is not None and not first.begins_with(bos) and list(tokenizer("a")["input_ids"][:1]) == [bos]:
            yield f"the template does not write {tokenizer.bos_token}, with which the tokenizer begins plain texts"
        rendering = render(tokenizer, first.row["messages"])
        if rendering.marked and not rendering.text[: rendering.marked[-1][1]].rstrip().endswith(ending.special):
            yield "the markers end before the end of turn, which is a target all the same"
    if "strftime_now" in _template(tokenizer):
        yield "the template writes the date: a set prepared on another day has other prompts"
