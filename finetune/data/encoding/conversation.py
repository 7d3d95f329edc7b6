"""Conversations become token ids and the targets among them, many rows at a time."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.encoding.control_tokens import ControlTokens, texts_in
from finetune.data.encoding.dropped_content import DroppedContentCheck
from finetune.data.encoding.target_spans import RenderedChat, TargetFinder, TrainOn
from finetune.data.encoding.tokenizer import EncodedText, TextTokenizer, has_double_bos, require_eos_id
from finetune.data.features import Features, Outcome, result_or_error
from finetune.data.rows import Row, require_valid_unicode
from finetune.data.templates.chat_template import end_of_turn
from finetune.data.templates.rendering import plain_turn_marks, render, turn_tokens
from finetune.data.turns import Turn
from finetune.errors import DataError
from finetune.runtime.files.recorded_names import recorded_as


@recorded_as("data.encoding.encode.ConversationEncoder")
class ConversationEncoder:
    """Encodes conversations as the chat template renders them; `train_on` says which turns are targets.

    The token that ends a target turn is a target, too. A last turn that the template does not end with a special
    token is ended with end-of-sequence, a target too.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        train_on: TrainOn = "assistant",
        system_prompt: str | None = None,
        template: str | None = None,
        allow_special_tokens: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens = TextTokenizer(tokenizer)
        self._system_prompt = system_prompt
        name = f"`{template}`" if template else "the tokenizer's own"
        self._finder = TargetFinder(tokenizer, end_of_turn(tokenizer), train_on, name)
        self._control = ControlTokens(tokenizer, turn_marks=turn_tokens(tokenizer), allowed=allow_special_tokens)
        self._turn_marks = plain_turn_marks(tokenizer, self._control.names)

    def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row's `messages` (with its `tools`, where it has some).

        None where there is no target; the DataError where the template refuses a row, would drop some of it in silence,
        or where its rendering of a beginning is not the beginning of its rendering of the whole, in text or in tokens.
        """
        dropped = DroppedContentCheck(self._finder)
        chats = [result_or_error(self._rendered_chat, row, dropped) for row in rows]
        found = [each for each in chats if isinstance(each, RenderedChat)]
        ordinary = iter(self._tokens.encode([each.text for each in found if not each.has_control_names]))
        renamed = [self._control.renamed(each.text) for each in found if each.has_control_names]
        guarded = iter(self._control.tokens.encode(renamed) if renamed else ())
        return [
            result_or_error(self._sample, each, next(guarded if each.has_control_names else ordinary))
            if isinstance(each, RenderedChat)
            else each
            for each in chats
        ]

    def _rendered_chat(self, row: Row, dropped: DroppedContentCheck) -> RenderedChat | None:
        """Return the row as text; its texts cannot be taken for control tokens."""
        texts = (row["messages"], row.get("tools") or ())
        if not self._control.held_by(texts):
            chat = self._plain_rendered_chat(row, dropped)
        else:
            messages, tools = self._control.with_stand_ins(texts)
            chat = self._plain_rendered_chat({**row, "messages": messages, "tools": tools}, dropped)
            chat = chat and replace(chat, has_control_names=True)
            self._check_same_rendering(row, {**row, "messages": messages, "tools": tools})
        if chat is None or self._turn_marks is None:
            return chat
        return replace(chat, has_turn_marks=any(map(self._turn_marks.search, texts_in(texts))))

    def _check_same_rendering(self, row: Row, stood_in: Row) -> None:
        """Raise DataError where the template treats names of control tokens otherwise than other text."""
        texts = [
            render(self._tokenizer, self._turns(each), tools=each.get("tools") or None).text for each in (row, stood_in)
        ]
        if texts[0] != self._control.restored(texts[1]):
            raise DataError(
                f"holds names of control tokens, which the chat template ({self._finder.template}) does not treat as "
                "text. Remove them from the row, or set data.allow_special_tokens: true."
            )

    def _plain_rendered_chat(self, row: Row, dropped: DroppedContentCheck) -> RenderedChat | None:
        turns, tools = self._turns(row), row.get("tools") or None
        context = row.get("num_context_turns", 0) + len(turns) - len(row["messages"])
        chat = self._finder.rendered_chat(turns, tools, num_context_turns=context)
        if chat is not None:
            require_valid_unicode(chat.text)
            dropped.check(turns, tools)
        return chat

    def _turns(self, row: Row) -> Sequence[Turn]:
        """Return the turns as the chat template is given them."""
        return with_system_prompt(row["messages"], self._system_prompt)

    def _sample(self, chat: RenderedChat, encoded: EncodedText) -> Features:
        if chat.has_control_names:
            self._control.check(encoded.ids.tolist(), encoded.text)
        features = self._features(chat, encoded)
        if not chat.has_control_names and not chat.has_turn_marks:
            return features
        return replace(features, has_control_names=chat.has_control_names, has_turn_marks=chat.has_turn_marks)

    def _features(self, chat: RenderedChat, encoded: EncodedText) -> Features:
        ids, end = encoded.ids, 0
        if has_double_bos(ids[:2].tolist(), self._tokenizer):
            raise DataError(
                f"the chat template writes {self._tokenizer.bos_token} twice at the beginning: the model expects it "
                f"once. "
                "Remove one from the template, or from the row if it is written there."
            )
        is_target = np.zeros(len(ids), dtype=bool)
        for span in chat.spans:
            start, end = (_edge(encoded, place, what=span.what) for place in (span.start, span.end))
            is_target[start:end] = True
        is_target[:1] = False  # nothing stands before it that it could be predicted from
        is_ended = end > 0 and is_target[end - 1] and int(ids[end - 1]) in self._tokens.special
        if is_ended or not chat.may_be_open:
            return _features(ids, is_target)
        return _features([*ids[:end].tolist(), require_eos_id(self._tokenizer)], np.append(is_target[:end], True))


def with_system_prompt(turns: Sequence[Turn], system_prompt: str | None) -> Sequence[Turn]:
    """Return the turns led by the system prompt, unless they have one of their own or none is wanted."""
    if system_prompt is None or any(turn["role"] == "system" for turn in turns):
        return turns
    return [{"role": "system", "content": system_prompt}, *turns]


def _edge(encoded: EncodedText, place: int, *, what: str) -> int:
    """Return the number of tokens before a character; raises DataError where a token reaches across it."""
    num_tokens = encoded.num_tokens_of(place)
    if num_tokens is None:
        edge = f"{encoded.text[max(0, place - 12) : place]!r} before {encoded.text[place : place + 12]!r}"
        raise DataError(
            f"a token crosses the boundary of {what} ({edge}): the model would be trained on other tokens than it "
            f"sees at inference. Remove leading whitespace from the content, or set data.chat_template to one that "
            f"writes a single-token marker there."
        )
    return num_tokens


def _features(ids: Sequence[int] | np.ndarray, is_target: np.ndarray) -> Features:
    return Features({"input_ids": np.asarray(ids, dtype=np.uint32), "is_target": is_target})
