"""Encode conversations as token ids and targets, and prompts for inference as token ids.

Prompts are read from rows of any format that has them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.encoding.control_tokens import ControlTokens, texts_in
from finetune.data.encoding.target_spans import (
    OTHER_TEMPLATES,
    REASONING,
    RenderedChat,
    TargetFinder,
    TrainOn,
    split_reasoning,
)
from finetune.data.encoding.template_support import DroppedContentCheck, with_known_roles
from finetune.data.encoding.tokenizer import EncodedText, TextTokenizer, has_double_bos, require_eos_id
from finetune.data.features import CONTROL_NAMES, Features, Findings, Outcome, result_or_error
from finetune.data.rows import (
    ARGUMENTS,
    RawRow,
    Row,
    Turn,
    read_template_arguments,
    read_tools,
    require_valid_unicode,
)
from finetune.data.templates.chat_template import end_of_turn, tokenize
from finetune.data.templates.rendering import (
    Arguments,
    ConversationRefused,
    Tools,
    known_words,
    own_arguments,
    readable_names,
    render_chat,
    turn_tokens,
)
from finetune.data.turns import read_turns
from finetune.errors import DataError
from finetune.registry.turns import WEIGHTS, standard_word


class ConversationEncoder:
    """Encodes conversations as the chat template renders them; `train_on` selects the turns that are targets.

    The token that ends a target turn is a target, too. If the template does not end the last turn with a special
    token, end-of-sequence is appended as a target. Without `train_on_reasoning` the reasoning of answers is context.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        train_on: TrainOn = "assistant",
        system_prompt: str | None = None,
        template: str | None = None,
        allow_special_tokens: bool = False,
        train_on_reasoning: bool = True,
        chooses_turns: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens = TextTokenizer(tokenizer)
        self._system_prompt = system_prompt
        name = f"`{template}`" if template else "the tokenizer's own"
        self._finder = TargetFinder(
            tokenizer, end_of_turn(tokenizer), train_on, name, train_on_reasoning, chooses_turns
        )
        self._known_arguments = readable_names(tokenizer)
        self._words = known_words(tokenizer)
        self._is_key_read: dict[str, bool] = {}
        self._control = ControlTokens(tokenizer, turn_marks=turn_tokens(tokenizer), allowed=allow_special_tokens)

    def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row's `messages`, with its `tools` and `chat_template_kwargs` if present.

        The outcome is None without a target, and a DataError if the template rejects the row, would silently drop part
        of it, or renders a prefix of the conversation differently from the whole, in text or in tokens. With
        `train_on: each_assistant` a row has one sample per answer.
        """
        if self._finder.train_on != "each_assistant":
            return self._encoded(rows)
        conversations = [
            [  # for each answer after the row's prompt, the conversation up to it: the answer is its only target
                {**row, "messages": row["messages"][:number]}
                for number, turn in enumerate(row["messages"], start=1)
                if turn["role"] == "assistant" and number > row.get("num_context_turns", 0)
            ]
            for row in rows
        ]
        outcomes = iter(self._encoded([each for of_row in conversations for each in of_row]))
        joined: list[Outcome] = []  # the samples of a row's answers, or the first error
        for of_row in conversations:
            own = [next(outcomes) for _ in of_row]
            error = next((outcome for outcome in own if isinstance(outcome, DataError)), None)
            joined.append(error or tuple(outcome for outcome in own if isinstance(outcome, Features)) or None)
        return joined

    def _encoded(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the outcome of each row as one conversation."""
        dropped = DroppedContentCheck(self._finder)
        chats = [result_or_error(self._rendered_chat, row, dropped) for row in rows]
        rendered = [chat for chat in chats if isinstance(chat, RenderedChat)]
        ordinary = iter(self._tokens.encode([chat.text for chat in rendered if not chat.has_control_names]))
        renamed = [self._control.renamed(chat.text) for chat in rendered if chat.has_control_names]
        guarded = iter(self._control.tokens.encode(renamed) if renamed else ())
        return [
            result_or_error(self._sample, chat, next(guarded if chat.has_control_names else ordinary))
            if isinstance(chat, RenderedChat)
            else chat
            for chat in chats
        ]

    def _rendered_chat(self, row: Row, dropped: DroppedContentCheck) -> RenderedChat | None:
        """Return the rendered row, in which names of control tokens in the row's texts are placeholders."""
        row = {**row, "messages": with_known_roles(row["messages"], self._words.roles)}
        arguments = own_arguments(row.get(ARGUMENTS) or {}, self._known_arguments)
        names, texts = ("messages", "tools", ARGUMENTS), (row["messages"], row.get("tools") or (), arguments)
        if not self._control.held_by(texts):
            chat = self._plain_rendered_chat({**row, ARGUMENTS: arguments} if row.get(ARGUMENTS) else row, dropped)
        else:
            replaced = {**row, **dict(zip(names, self._control.with_placeholders(texts), strict=True))}
            pairs = [] if self._finder.train_on_reasoning else zip(row["messages"], replaced["messages"], strict=True)
            for number, (turn, other) in enumerate(pairs, start=1):
                if split_reasoning(turn)[0] and not split_reasoning(other)[0]:
                    raise DataError(
                        f"the markers of reasoning in the content of turn {number} are special tokens of this "
                        "tokenizer, and names of special tokens in rows are text: the reasoning cannot be left out of "
                        "the targets. Give it as `reasoning_content`, or set data.allow_special_tokens: true."
                    )
            chat = self._plain_rendered_chat(replaced, dropped)
            chat = chat and replace(chat, has_control_names=True, findings=chat.findings.plus(CONTROL_NAMES))
            renderings = [
                render_chat(
                    self._tokenizer, self._turns(each), tools=each["tools"] or None, arguments=each[ARGUMENTS]
                ).text
                for each in ({**row, **dict(zip(names, texts, strict=True))}, replaced)
            ]
            if renderings[0] != self._control.restored(renderings[1]):
                raise DataError(
                    f"contains names of control tokens, which the chat template ({self._finder.template}) does not "
                    "treat as text. Remove them from the row, or set data.allow_special_tokens: true."
                )
        if chat is None:
            return None
        own = Findings(
            frozenset({"argument_rows"} if arguments else ()),
            unread_keys=frozenset(self._unread_keys(row, arguments)),
        )
        return replace(chat, findings=chat.findings.plus(own))

    def _unread_keys(self, row: Row, arguments: Arguments) -> Iterator[str]:
        """Yield the keys of turns that the template neither names nor writes, as one that writes whole turns does."""
        for name in {name: None for turn in row["messages"] if len(turn) > 2 for name in turn}:
            if name not in self._is_key_read:
                is_known = name in _READ_KEYS or name in self._words.keys or standard_word(name) in WEIGHTS
                self._is_key_read[name] = is_known or self._is_written(name, row, arguments)
            if not self._is_key_read[name]:
                yield name

    def _is_written(self, name: str, row: Row, arguments: Arguments) -> bool:
        turns, tools = self._turns(row), row.get("tools") or None
        without = [{key: value for key, value in turn.items() if key != name} for turn in turns]
        try:
            first, second = (
                render_chat(self._tokenizer, shown, tools=tools, arguments=arguments).text for shown in (turns, without)
            )
        except DataError:  # turns after the last target, which have not been rendered
            return False
        return first != second

    def _plain_rendered_chat(self, row: Row, dropped: DroppedContentCheck) -> RenderedChat | None:
        turns, tools, arguments = self._turns(row), row.get("tools") or None, row.get(ARGUMENTS)
        context = row.get("num_context_turns", 0) + len(turns) - len(row["messages"])
        try:
            chat = self._finder.rendered_chat(turns, tools, arguments=arguments, num_context_turns=context)
        except ConversationRefused as refusal:
            if refusal.num_turns >= len(turns):
                raise
            render_chat(self._tokenizer, turns, tools=tools, arguments=arguments)  # is the conversation refused, too?
            before, _, reason = str(refusal).partition("refuses the conversation ")
            is_other = self._finder.chooses_turns and self._finder.train_on != "last_assistant"
            instead = "data.train_on: last_assistant, or " if is_other else ""
            raise DataError(
                f"{before}renders the conversation, but refuses it when it stops after turn {refusal.num_turns} "
                f"{reason.rstrip('.')}. Set {instead}data.chat_template to {OTHER_TEMPLATES}."
            ) from refusal.__cause__
        if chat is not None:
            require_valid_unicode(chat.text)
            dropped.check(turns, tools, arguments)
        return chat

    def _turns(self, row: Row) -> Sequence[Turn]:
        """Return the turns that are passed to the chat template."""
        return with_system_prompt(row["messages"], self._system_prompt)

    def _sample(self, chat: RenderedChat, encoded: EncodedText) -> Features:
        if chat.has_control_names:
            self._control.check(encoded.ids.tolist(), encoded.text)
        return replace(self._features(chat, encoded), findings=chat.findings)

    def _features(self, chat: RenderedChat, encoded: EncodedText) -> Features:
        ids, end = encoded.ids, 0
        if has_double_bos(ids[:2].tolist(), self._tokenizer):
            raise DataError(
                f"the chat template writes {self._tokenizer.bos_token} twice at the start: the model expects it once. "
                "Remove one from the template, or from the row if it is written there."
            )
        is_target = np.zeros(len(ids), dtype=bool)
        for span in chat.spans:
            edges = []
            for offset in (span.start, span.end):
                num_tokens = encoded.num_tokens_of(offset)
                if num_tokens is None:
                    before, after = encoded.text[max(0, offset - 12) : offset], encoded.text[offset : offset + 12]
                    raise DataError(
                        f"a token crosses the boundary of {span.what} ({before!r} before {after!r}): the model would "
                        "be trained on different tokens than it sees at inference. Remove whitespace there from the "
                        "row, or move it to the start of the answer; or set data.chat_template to one that writes a "
                        "single-token marker there."
                    )
                edges.append(num_tokens)
            start, end = edges
            is_target[start:end] = True
        is_target[:1] = False  # there is no context to predict the first token from
        is_ended = end > 0 and is_target[end - 1] and int(ids[end - 1]) in self._tokens.special
        if is_ended or not chat.may_be_open:
            return Features({"input_ids": np.asarray(ids, np.uint32), "is_target": is_target})
        ids = np.append(ids[:end], np.uint32(require_eos_id(self._tokenizer)))
        return Features({"input_ids": ids, "is_target": np.append(is_target[:end], True)})


_READ_KEYS = frozenset(("role", "content", "tool_calls", *REASONING))


def with_system_prompt(turns: Sequence[Turn], system_prompt: str | None) -> Sequence[Turn]:
    """Return the turns with the system prompt prepended, unless they have one or none is configured."""
    if system_prompt is None or any(turn["role"] == "system" for turn in turns):
        return turns
    return [{"role": "system", "content": system_prompt}, *turns]


@dataclass(frozen=True)
class ChatPrompt:
    """Turns to be answered, and the tools that may be called."""

    turns: Sequence[Turn]
    tools: Tools | None = None
    arguments: Arguments | None = None  # the row's own chat template arguments
    has_own_system: bool = False  # the first turn is the configured system prompt, not the row's

    def text(self) -> str:
        """Return the content of the last turn: the prompt of a model without a chat template."""
        return "".join(texts_in(self.turns[-1]["content"]))


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
        name = "tools" if row.get("tools") else "functions"
        tools = read_tools(row[name], title=f"`{name}`", are_functions=name != "tools") if row.get(name) else None
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
    prompt = replace(prompt, turns=with_known_roles(prompt.turns, known_words(tokenizer).roles))
    control = _control_tokens(tokenizer, str(tokenizer.chat_template))
    system_turns = list(prompt.turns[: int(prompt.has_own_system)])
    arguments = own_arguments(prompt.arguments or {}, readable_names(tokenizer))
    row_parts = (prompt.turns[len(system_turns) :], prompt.tools or (), arguments)
    if not control.held_by(row_parts):
        rendered = render_chat(
            tokenizer, prompt.turns, tools=prompt.tools, arguments=arguments, add_generation_prompt=True
        )
        return tokenize(tokenizer, require_valid_unicode(rendered.text))
    turns, tools, arguments = control.with_placeholders(row_parts)
    rendered = render_chat(
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
        return read_turns(row["conversations"], title="`conversations`")
    text = row.get("system")
    before = [{"role": "system", "content": text}] if isinstance(text, str) and text else []
    prompt = row.get("prompt")
    if isinstance(prompt, list | dict):
        return [*before, *read_turns(prompt, title="`prompt`")]
    if isinstance(prompt, str):
        return [*before, {"role": "user", "content": prompt}]
    if isinstance(row.get("instruction"), str):
        instruction = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
        return [*before, {"role": "user", "content": instruction}]
    columns = ", ".join(f"`{name}`" for name in row)
    raise DataError(f"has neither `messages`, `conversations`, `prompt` nor `instruction`; its columns are {columns}.")
