"""Turns or text become token ids and the targets among them, many rows at a time."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.encoding.chat import end_of_turn
from finetune.data.encoding.drops import DropCheck
from finetune.data.encoding.masks import Lesson, Masking, TrainOn
from finetune.data.encoding.tokens import Encoded, Tokens, well_formed
from finetune.data.features import Features, Outcome
from finetune.data.formats.turns import Turn
from finetune.data.rows import Row
from finetune.errors import DataError


class TextEncoder:
    """Encodes texts as the tokenizer begins them, ended by end-of-sequence; all tokens but the first are targets."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens = Tokens(tokenizer)

    def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row's `text`; None when nothing is left to predict, or what is wrong with it."""
        texts = [attempted(well_formed, row["text"]) for row in rows]
        begun = iter(self._tokens.begun([text for text in texts if isinstance(text, str)]))
        return [attempted(self._features, next(begun)) if isinstance(text, str) else text for text in texts]

    def _features(self, ids: list[int]) -> Features | None:
        tokenizer = self._tokenizer
        if not ids or ids == [tokenizer.bos_token_id]:
            return None
        if _begins_twice(ids, tokenizer):
            raise DataError(
                f"begins with {tokenizer.bos_token}, which the tokenizer writes itself: it would stand there twice."
            )
        if ids[-1] != _end_of_sequence(tokenizer):
            ids = [*ids, _end_of_sequence(tokenizer)]
        is_target = np.ones(len(ids), dtype=bool)
        is_target[0] = False
        return _features(ids, is_target)


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> Features | None:
    """Return the features of one text, or None when nothing is left to predict; raises DataError."""
    (outcome,) = _text_encoder(tokenizer)([{"text": text}])
    if isinstance(outcome, DataError):
        raise outcome
    return outcome


_text_encoder = lru_cache(maxsize=4)(TextEncoder)


class ConversationEncoder:
    """Encodes conversations as the chat template renders them; `train_on` says which turns are targets.

    Each learnt turn is learnt with the token that ends it. A last turn that the template does not end with a special
    token is ended with end-of-sequence, a target too.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        train_on: TrainOn = "assistant",
        system_prompt: str | None = None,
        template: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens = Tokens(tokenizer)
        self._system_prompt = system_prompt
        name = f"`{template}`" if template else "the tokenizer's own"
        self._masking = Masking(tokenizer, end_of_turn(tokenizer), train_on, name)

    def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row's `messages` (with its `tools`, where it has some).

        None where nothing is learnt; the DataError where the template refuses a row, would drop some of it in silence,
        or where its rendering of a beginning is not the beginning of its rendering of the whole, in text or in tokens.
        """
        drops = DropCheck(self._masking)
        lessons = [attempted(self._lesson, row, drops) for row in rows]
        encoded = iter(self._tokens.encode([each.text for each in lessons if isinstance(each, Lesson)]))
        return [
            attempted(self._features, each, next(encoded)) if isinstance(each, Lesson) else each for each in lessons
        ]

    def _lesson(self, row: Row, drops: DropCheck) -> Lesson | None:
        turns, tools = self._turns(row), row.get("tools") or None
        context = row.get("num_context_turns", 0) + len(turns) - len(row["messages"])
        lesson = self._masking.lesson(turns, tools, num_context_turns=context)
        if lesson is not None:
            well_formed(lesson.text)
            drops.check(turns, tools)
        return lesson

    def _turns(self, row: Row) -> Sequence[Turn]:
        """Return the turns as the chat template is given them."""
        return with_system_prompt(row["messages"], self._system_prompt)

    def _features(self, lesson: Lesson, encoded: Encoded) -> Features:
        ids, end = encoded.ids, 0
        if _begins_twice(ids[:2].tolist(), self._tokenizer):
            raise DataError(
                f"the chat template writes {self._tokenizer.bos_token} twice at the beginning: the model knows one. "
                "Remove one from the template, or from the row where it stands there."
            )
        is_target = np.zeros(len(ids), dtype=bool)
        for stretch in lesson.stretches:
            start, end = (_edge(encoded, place, what=stretch.what) for place in (stretch.start, stretch.end))
            is_target[start:end] = True
        is_target[:1] = False  # nothing stands before it that it could be predicted from
        is_ended = end > 0 and is_target[end - 1] and int(ids[end - 1]) in self._tokens.special
        if is_ended or not lesson.may_be_open:
            return _features(ids, is_target)
        return _features([*ids[:end].tolist(), _end_of_sequence(self._tokenizer)], np.append(is_target[:end], True))


Made = TypeVar("Made")


def attempted(make: Callable[..., Made], *arguments: Any) -> Made | DataError:
    """Return what is made, or the DataError that says why it is not."""
    try:
        return make(*arguments)
    except DataError as error:
        return error


def with_system_prompt(turns: Sequence[Turn], system_prompt: str | None) -> Sequence[Turn]:
    """Return the turns led by the system prompt, unless they have one of their own or none is wanted."""
    if system_prompt is None or any(turn["role"] == "system" for turn in turns):
        return turns
    return [{"role": "system", "content": system_prompt}, *turns]


def unknown_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that stand for text which the tokenizer cannot represent; empty for byte-level ones."""
    unknown = {tokenizer.unk_token_id} - {
        None,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    }  # GPT-2 names one for all
    return frozenset(map(int, unknown))


def forgets_unknown_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether text that the tokenizer does not know leaves no token at all, so that nobody can count it."""
    rare = ("\U00012000", "\U0001d11e", "\ua66e", "\u2603")  # cuneiform, a clef, an eye, a snowman
    known, *others = (
        tokenizer(f"a {sign}", add_special_tokens=False, verbose=False)["input_ids"] for sign in ("", *rare)
    )
    return any(ids == known for ids in others)


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, str]:
    """Return digests of everything about the tokenizer that the encoding depends on: part of a cache's key."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        parts = json.loads(backend.to_str())
        described = json.dumps({name: part for name, part in parts.items() if name not in ("truncation", "padding")})
    else:
        described = repr(sorted(tokenizer.get_vocab().items())) + repr(tokenizer.init_kwargs)
    special = repr((tokenizer.bos_token_id, tokenizer.eos_token_id, sorted(tokenizer.all_special_ids)))
    return {
        "tokenizer": _digest(type(tokenizer).__name__ + described + special),
        "chat_template": _digest(repr(tokenizer.chat_template)),
    }


def _edge(encoded: Encoded, place: int, *, what: str) -> int:
    """Return the number of tokens before a character; raises DataError where a token reaches across it."""
    num_tokens = encoded.num_tokens_of(place)
    if num_tokens is None:
        edge = f"{encoded.text[max(0, place - 12) : place]!r} before {encoded.text[place : place + 12]!r}"
        raise DataError(
            f"a token reaches across an edge of {what} ({edge}): the model would be trained on other tokens than it is "
            "asked with. Remove blanks at the beginning of the content, or set data.chat_template to one that writes a "
            "mark of one token there."
        )
    return num_tokens


def _begins_twice(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    return tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2


def _end_of_sequence(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token, so the model could not learn where to stop.")
    return int(tokenizer.eos_token_id)


def _features(ids: Sequence[int] | np.ndarray, is_target: np.ndarray) -> Features:
    return Features({"input_ids": np.asarray(ids, dtype=np.uint32), "is_target": is_target})


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
