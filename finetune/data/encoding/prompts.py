"""Prompts for inference: convert rows of any format with prompts to turns, and turns to the tokens of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.data.encoding.control_tokens import ControlTokens
from finetune.data.rows import RawRow, Row, require_valid_unicode
from finetune.data.templates.chat_template import tokenize
from finetune.data.templates.rendering import Arguments, Tools, own_arguments, readable_names, render, turn_tokens
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
    arguments: Arguments | None = None  # the row's own chat template arguments
    has_own_system: bool = False  # the first turn is the configured system prompt, not the row's

    def text(self) -> str:
        """Return the content of the last turn: the prompt of a model without a chat template."""
        return str(self.turns[-1]["content"])


def read_prompt(raw: RawRow, *, system: str | None = None) -> ChatPrompt:
    """Return the prompt of the row: its `messages`, `conversations`, `prompt` (text or turns) or `instruction`.

    Assistant turns at the end are removed. `system` is added to rows without a system message. Raises DataError naming
    the row.
    """
    row = raw.parse()
    try:
        turns = list(_turns(row))
        while turns and turns[-1]["role"] == "assistant":
            turns.pop()
        if not turns:
            raise DataError("has only answers, no prompt.")
        tools = read_tools(row["tools"], title="`tools`") if row.get("tools") else None
        own = read_template_arguments(row[ARGUMENTS], title=f"`{ARGUMENTS}`") if row.get(ARGUMENTS) else None
    except DataError as error:
        raise DataError(f"{raw.location}: {error}") from error
    has_own_system = bool(system) and turns[0]["role"] != "system"
    if has_own_system:
        turns.insert(0, {"role": "system", "content": system})
    return ChatPrompt(turns, tools, own, has_own_system=has_own_system)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: ChatPrompt) -> list[int]:
    """Return the tokens of the prompt: rendered by the chat template, or without one, the last turn's content.

    Names of control tokens in the prompt are encoded as plain text. Raises DataError if the tokenizer cannot do that.
    """
    if not tokenizer.chat_template:
        return list(text_inputs(tokenizer, prompt.text())["input_ids"])
    control = _control_tokens(tokenizer, str(tokenizer.chat_template))
    system_turns = list(prompt.turns[: int(prompt.has_own_system)])
    arguments = own_arguments(prompt.arguments or {}, readable_names(tokenizer))
    row_parts = (prompt.turns[len(system_turns) :], prompt.tools or (), arguments)
    if not control.held_by(row_parts):
        rendered = render(tokenizer, prompt.turns, tools=prompt.tools, arguments=arguments, add_generation_prompt=True)
        return tokenize(tokenizer, require_valid_unicode(rendered.text))
    turns, tools, arguments = control.with_placeholders(row_parts)
    rendered = render(
        tokenizer, [*system_turns, *turns], tools=tools or None, arguments=arguments, add_generation_prompt=True
    )
    text = control.renamed(rendered.text)
    ids = control.tokens.ids(require_valid_unicode(text))
    control.check(ids, text)
    return ids


def text_inputs(tokenizer: PreTrainedTokenizerBase, text: str, **options: Any) -> Any:
    """Return the tokenizer's output for a text, in which names of control tokens are plain text."""
    control = _control_tokens(tokenizer, "")
    require_valid_unicode(text)
    if not control.held_by(text):
        return tokenizer(text, **options)
    control.check_plain([text])
    return control.tokenizer(text, **options)


@lru_cache(maxsize=4)
def _control_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> ControlTokens:
    return ControlTokens(tokenizer, turn_marks=turn_tokens(tokenizer) if template else ())


def _turns(row: Row) -> Sequence[Turn]:
    if row.get("images"):
        raise DataError("has `images`, but only text is supported here. Remove the column.")
    if row.get("messages") is not None:
        return read_turns(row["messages"], title="`messages`")
    if row.get("conversations") is not None:
        return read_sharegpt_turns(row["conversations"], title="`conversations`")
    text = row.get("system")
    before = [{"role": "system", "content": text}] if isinstance(text, str) and text else []
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return [*before, *read_turns(prompt, title="`prompt`")]
    if isinstance(prompt, str):
        return [*before, {"role": "user", "content": prompt}]
    if isinstance(row.get("instruction"), str):
        instruction = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
        return [*before, {"role": "user", "content": instruction}]
    columns = ", ".join(f"`{name}`" for name in row)
    raise DataError(f"has neither `messages`, `conversations`, `prompt` nor `instruction`; its columns are {columns}.")
