"""Prompts for inference: rows of any format that holds questions become turns, and turns the tokens of a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.data.encoding.control_tokens import ControlTokens
from finetune.data.rows import RawRow, Row, require_valid_unicode
from finetune.data.templates.arguments import Arguments, own_arguments, readable_names
from finetune.data.templates.chat_template import tokenize
from finetune.data.templates.rendering import Tools, render, turn_tokens
from finetune.data.turns import (
    ARGUMENTS,
    Turn,
    read_sharegpt_turns,
    read_template_arguments,
    read_tools,
    read_turns,
)
from finetune.errors import DataError


@dataclass(frozen=True)
class ChatPrompt:
    """Turns to be answered, and the tools that may be called."""

    turns: Sequence[Turn]
    tools: Tools | None = None
    arguments: Arguments | None = None  # the row's own, of the chat template
    has_own_system: bool = False  # the first turn is the user's own words, not a row's

    def text(self) -> str:
        """Return the words of the last turn: what a model without a chat template goes on from."""
        return str(self.turns[-1]["content"])


def read_prompt(raw: RawRow, *, system: str | None = None) -> ChatPrompt:
    """Return what the row asks: its `messages`, `conversations`, `prompt` (text or turns) or `instruction`.

    An answer that stands at the end is left out: it is what is asked for. `system` is the message of rows without one.
    Raises DataError naming the row.
    """
    row = raw.parse()
    try:
        turns = list(_turns(row))
        while turns and turns[-1]["role"] == "assistant":
            turns.pop()
        if not turns:
            raise DataError("has only answers: there is no prompt in it.")
        tools = read_tools(row["tools"], title="`tools`") if row.get("tools") else None
        own = read_template_arguments(row[ARGUMENTS], title=f"`{ARGUMENTS}`") if row.get(ARGUMENTS) else None
    except DataError as error:
        raise DataError(f"{raw.place}: {error}") from error
    is_led = bool(system) and turns[0]["role"] != "system"
    if is_led:
        turns.insert(0, {"role": "system", "content": system})
    return ChatPrompt(turns, tools, own, has_own_system=is_led)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: ChatPrompt) -> list[int]:
    """Return the tokens that the answer follows: rendered by the chat template, or, without one, the last words.

    What is asked is text: names of control tokens in it are not these tokens. Raises DataError where they cannot be
    told apart.
    """
    if not tokenizer.chat_template:
        return list(text_inputs(tokenizer, prompt.text())["input_ids"])
    control = _control_tokens(tokenizer, str(tokenizer.chat_template))
    led = list(prompt.turns[: int(prompt.has_own_system)])
    arguments = own_arguments(prompt.arguments or {}, readable_names(tokenizer))
    asked = (prompt.turns[len(led) :], prompt.tools or (), arguments)
    if not control.held_by(asked):
        rendered = render(tokenizer, prompt.turns, tools=prompt.tools, arguments=arguments, add_generation_prompt=True)
        return tokenize(tokenizer, require_valid_unicode(rendered.text))
    turns, tools, arguments = control.with_placeholders(asked)
    rendered = render(tokenizer, [*led, *turns], tools=tools or None, arguments=arguments, add_generation_prompt=True)
    text = control.renamed(rendered.text)
    ids = control.tokens.ids(require_valid_unicode(text))
    control.check(ids, text)
    return ids


def text_inputs(tokenizer: PreTrainedTokenizerBase, text: str, **how: Any) -> Any:
    """Return what the tokenizer makes of a text, in which names of control tokens are text."""
    control = _control_tokens(tokenizer, "")
    require_valid_unicode(text)
    if not control.held_by(text):
        return tokenizer(text, **how)
    control.check_plain([text])
    return control.tokenizer(text, **how)


@lru_cache(maxsize=4)
def _control_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> ControlTokens:
    return ControlTokens(tokenizer, turn_marks=turn_tokens(tokenizer) if template else ())


def _turns(row: Row) -> Sequence[Turn]:
    if row.get("images"):
        raise DataError("has `images`, but only text can be given here. Remove the column.")
    if row.get("messages") is not None:
        return read_turns(row["messages"], title="`messages`")
    if row.get("conversations") is not None:
        return read_sharegpt_turns(row["conversations"], title="`conversations`")
    before = _text_turn("system", row)
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return [*before, *read_turns(prompt, title="`prompt`")]
    if isinstance(prompt, str):
        return [*before, {"role": "user", "content": prompt}]
    if isinstance(row.get("instruction"), str):
        asked = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
        return [*before, {"role": "user", "content": asked}]
    columns = ", ".join(f"`{name}`" for name in row)
    raise DataError(f"has neither `messages`, `conversations`, `prompt` nor `instruction`; its columns are {columns}.")


def _text_turn(role: str, row: Mapping[str, Any]) -> list[Turn]:
    text = row.get(role)
    return [{"role": role, "content": text}] if isinstance(text, str) and text else []
