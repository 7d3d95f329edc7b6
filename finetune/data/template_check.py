"""Check of a chat template with its tokenizer: encodes small conversations, once per prepared dataset."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.config.sections.data import DataSection
from finetune.data.encoding.conversation import ConversationEncoder
from finetune.data.encoding.target_spans import first_difference
from finetune.data.features import Features, Outcome, Unlabeled
from finetune.data.rows import Row
from finetune.data.templates.chat_template import end_of_turn, is_special, tokenize
from finetune.data.templates.rendering import arguments_of, has_markers, render_chat
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
"""Conversations that a template may be able to render, by the feature they use."""


_RECORDED_KEYS = {"trains_on_end": "is_end_learnt", "trained_cases": "learnt"}


@dataclass(frozen=True)
class PromptMismatch:
    """A prompt at inference that is not a prefix of the corresponding training sample."""

    case: str
    prompt: str  # an excerpt around the first difference
    trained: str
    prompt_tokens: tuple[str, ...]
    trained_tokens: tuple[str, ...]


@dataclass(frozen=True)
class TemplateCheck:
    """The findings for a tokenizer and its chat template; plain values, for JSON."""

    template: str
    targets_by: str  # `markers` of the template, or `renderings` of prefixes
    end_of_turn: str  # empty if the template writes none
    end_of_turn_tokens: tuple[int, ...]
    trains_on_end: bool  # the last target of an answer ends the turn; False without targets
    begins_with: str  # the beginning-of-sequence that the template writes; empty if it writes none
    trained_cases: tuple[str, ...]  # cases with targets
    refused: Mapping[str, str]  # the other cases, with the reason
    differences: tuple[PromptMismatch, ...]
    wants_parts: bool  # it renders content only as a list of parts
    arguments: Mapping[str, Any] = field(default_factory=dict)  # passed to the template for every conversation
    default_system: str = ""  # the system prompt that the template adds where a conversation has none

    def lines(self) -> Iterator[str]:
        """Yield the findings as text for a terminal."""
        method = "its {% generation %} markers" if self.targets_by == "markers" else "rendering prefixes"
        yield f"chat template {self.template}: its targets are located by {method}"
        if self.arguments:
            named = ", ".join(f"{name}: {format_json(value)}" for name, value in self.arguments.items())
            yield f"  rendered with {named}"
        if self.default_system:
            yield f"  {self.default_system_line()}"
        yield f"  trainable: {', '.join(self.trained_cases) or 'nothing'}"
        yield from (f"  not trainable: {case}: {reason}" for case, reason in self.refused.items())
        if self.trained_cases:
            end, num_tokens = "none, so end-of-sequence follows the last answer", len(self.end_of_turn_tokens)
            if self.end_of_turn:
                size = "one token" if num_tokens == 1 else f"{num_tokens} tokens of plain text"
                end = f"{self.end_of_turn!r}, {size}"
            yield f"  end of turn: {end}, {'a target' if self.trains_on_end else 'NOT a target'}"
            yield f"  beginning of sequence: {self.begins_with or 'not written'}"
        for difference in self.differences:
            yield (
                f"  {difference.case}: the prompt at inference is {difference.prompt} but the model was trained on "
                f"{difference.trained}"
            )
            yield f"    tokens {list(difference.prompt_tokens)} vs. {list(difference.trained_tokens)}"
        if self.trained_cases and not self.differences:
            yield "  prompts at inference are prefixes of the training samples"
        if self.wants_parts:
            yield '  content must be a list of parts: [{"type": "text", "text": "..."}]'

    def default_system_line(self) -> str:
        """Return the sentence about the template's own system prompt."""
        return (
            "conversations without a system turn get the template's own, in training and in answers alike: "
            f"{self.default_system!r}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the findings with the names that `audit.json` has for them."""
        return {_RECORDED_KEYS.get(name, name): value for name, value in asdict(self).items()}


def check_template(tokenizer: PreTrainedTokenizerBase, section: DataSection) -> TemplateCheck:
    """Return the result of encoding small conversations with the chat template and the section's `train_on`."""
    encoder = ConversationEncoder(
        tokenizer,
        train_on=section.train_on,
        template=section.chat_template,
        train_on_reasoning=section.train_on_reasoning,
    )
    # Some templates render content only as a list of parts.
    in_parts = {
        case: {
            **row,
            "messages": [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in row["messages"]],
        }
        for case, row in CASES.items()
    }
    as_text, as_parts = (_last(encoder([rows["one answer"]])[0]) for rows in (CASES, in_parts))
    rows = in_parts if isinstance(as_text, DataError) and isinstance(as_parts, Features) else CASES
    outcomes = {case: _last(encoder([row])[0]) for case, row in rows.items()}
    encoded = {case: outcome for case, outcome in outcomes.items() if isinstance(outcome, Features)}
    samples = [_Sample(case, rows[case], features, tokenizer) for case, features in encoded.items()]
    ending, bos = end_of_turn(tokenizer), tokenizer.bos_token_id
    differences: list[PromptMismatch] = []  # of prompts that are not prefixes of their samples
    last_targets: list[int] = []
    for sample in samples:
        last_targets.append(sample.ids[int(np.flatnonzero(sample.features.arrays["is_target"])[-1])])
        position = next((i for i, token in enumerate(sample.prompt) if sample.ids[i : i + 1] != [token]), None)
        if position is not None:
            texts = first_difference(tokenizer.decode(sample.prompt), tokenizer.decode(sample.ids))
            around = slice(max(0, position - 2), position + 6)
            tokens = (tuple(tokenizer.convert_ids_to_tokens(ids[around])) for ids in (sample.prompt, sample.ids))
            differences.append(PromptMismatch(sample.case, *texts, *tokens))
    trains_on_end = all(last in ending.tokens[-1:] or is_special(tokenizer, last) for last in last_targets)
    # without the remedies, which apply to rows
    refused = {
        case: str(outcome or "it has no target").partition(" Set ")[0].partition(" The prompt at inference ")[0]
        for case, outcome in outcomes.items()
        if case not in encoded
    }
    return TemplateCheck(
        template=f"`{section.chat_template}`" if section.chat_template else "of the tokenizer",
        targets_by="markers" if has_markers(str(tokenizer.get_chat_template())) else "renderings",
        end_of_turn=ending.text,
        end_of_turn_tokens=ending.tokens,
        trains_on_end=bool(samples) and trains_on_end,
        begins_with=str(tokenizer.bos_token) if samples and samples[0].ids[0] == bos else "",
        trained_cases=tuple(encoded),
        refused=refused,
        differences=tuple(differences),
        wants_parts=rows is not CASES,
        arguments=dict(arguments_of(tokenizer)),
        default_system=_default_system(tokenizer, rows),
    )


def _default_system(tokenizer: PreTrainedTokenizerBase, rows: Mapping[str, Row]) -> str:
    """Return the system prompt that the template adds to a conversation without one; empty if it adds none."""
    try:
        texts = [render_chat(tokenizer, rows[case]["messages"][:-1]).text for case in ("one answer", "system message")]
    except DataError:  # it refuses system messages
        return ""
    without, given = (text.partition(ASKED["content"])[0] for text in texts)
    before, found, after = given.partition(SYSTEM["content"])
    is_written = found and without.startswith(before) and without.removeprefix(before).endswith(after)
    return without.removeprefix(before).removesuffix(after).strip() if is_written else ""


def _last(outcome: Outcome) -> Features | DataError | None:
    """Return the sample of the whole conversation if every answer is a sample."""
    last = outcome[-1] if isinstance(outcome, tuple) else outcome
    return None if isinstance(last, Unlabeled) else last


@dataclass(frozen=True)
class _Sample:
    """A small conversation encoded for training."""

    case: str
    row: Row
    features: Features
    tokenizer: PreTrainedTokenizerBase

    @cached_property
    def ids(self) -> list[int]:
        return [int(token) for token in self.features.arrays["input_ids"]]

    @cached_property
    def prompt(self) -> list[int]:
        """Return the tokens of the prompt, made the way an inference server makes them."""
        turns, tools = self.row["messages"][:-1], self.row.get("tools")
        return tokenize(
            self.tokenizer, render_chat(self.tokenizer, turns, tools=tools, add_generation_prompt=True).text
        )
