"""Encode rows of plain texts: for pre-training, masked language modeling, and source-target tasks.

The names of control tokens in these texts are encoded as plain text.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.encoding.control_tokens import ControlTokens, texts_in
from finetune.data.encoding.tokenizer import TextTokenizer, has_double_bos, require_eos_id
from finetune.data.features import Features, Outcome, result_or_error
from finetune.data.rows import Row, require_valid_unicode
from finetune.errors import DataError
from finetune.runtime.files.digests import recorded_as


class TextRowsEncoder:
    """Encodes rows of texts; rows with names of control tokens use a renamed tokenizer that encodes these as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, allow_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer, allowed=allow_special_tokens)

    def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row, None if it has no target, or its error."""
        texts = [list(self._texts_of(row)) for row in rows]
        guarded = [index for index, row_texts in enumerate(texts) if self._control.held_by(row_texts)]
        if not guarded:
            return self._encoded(rows)
        ordinary = [index for index in range(len(rows)) if index not in set(guarded)]
        outcomes: list[Outcome] = [None] * len(rows)
        for index, outcome in zip(ordinary, self._encoded([rows[index] for index in ordinary]), strict=True):
            outcomes[index] = outcome
        for index, outcome in zip(guarded, self._encoded_renamed([rows[index] for index in guarded]), strict=True):
            is_good = isinstance(outcome, Features)
            outcomes[index] = result_or_error(self._checked, outcome, texts[index]) if is_good else outcome
        return outcomes

    @abstractmethod
    def _encoded(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the outcome of each row."""

    @abstractmethod
    def _with(self, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Return the same encoder with another tokenizer."""

    def _texts_of(self, row: Row) -> Iterable[str]:
        """Return the values of the row that are encoded and are strings."""
        return (value for name in ("text", "text_pair") if isinstance(value := row.get(name), str))

    def _encoded_renamed(self, rows: Sequence[Row]) -> list[Outcome]:
        try:
            return self._renamed_encoder._encoded(rows)
        except DataError as error:
            return [error] * len(rows)

    def _checked(self, features: Features, texts: Sequence[str]) -> Features:
        self._control.check_plain(texts)
        return replace(features, has_control_names=True)

    @cached_property
    def _renamed_encoder(self) -> Self:
        return self._with(self._control.tokenizer)


@recorded_as("data.encoding.text.TextEncoder")
class TextEncoder(TextRowsEncoder):
    """Encodes texts with the tokenizer's prefix and end-of-sequence; all tokens but the first are targets.

    Reads the `text` of each row; the outcome is None if there is nothing to predict.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, allow_special_tokens: bool = False) -> None:
        super().__init__(tokenizer, allow_special_tokens=allow_special_tokens)
        self._tokens = TextTokenizer(tokenizer)

    def _with(self, tokenizer: PreTrainedTokenizerBase) -> Self:
        return type(self)(tokenizer)

    def _encoded(self, rows: Sequence[Row]) -> list[Outcome]:
        texts = [result_or_error(require_valid_unicode, row["text"]) for row in rows]
        begun = iter(self._tokens.begun([text for text in texts if isinstance(text, str)]))
        return [result_or_error(self._features, next(begun)) if isinstance(text, str) else text for text in texts]

    def _features(self, ids: list[int]) -> Features | None:
        tokenizer = self._tokenizer
        if not ids or ids == [tokenizer.bos_token_id]:
            return None
        if has_double_bos(ids, tokenizer):
            raise DataError(
                f"starts with {tokenizer.bos_token}, which the tokenizer adds itself: it would occur twice."
            )
        if ids[-1] != require_eos_id(tokenizer):
            ids = [*ids, require_eos_id(tokenizer)]
        is_target = np.ones(len(ids), dtype=bool)
        is_target[0] = False
        return Features({"input_ids": np.asarray(ids, dtype=np.uint32), "is_target": is_target})


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> Features | None:
    """Return the features of one text, or None if there is nothing to predict; raises DataError."""
    (outcome,) = _text_encoder(tokenizer)([{"text": text}])
    if isinstance(outcome, DataError):
        raise outcome
    assert not isinstance(outcome, tuple)  # a text is one sample
    return outcome


_text_encoder = lru_cache(maxsize=4)(TextEncoder)


@recorded_as("data.encoding.masked_text.MaskedTextEncoder")
class MaskedTextEncoder(TextRowsEncoder):
    """Encodes texts with the special tokens that the tokenizer adds.

    `is_target` marks the tokens that may be masked, never special ones; with `words`, `is_word_start` marks the first
    token of each word. Raises DataError for a tokenizer that does not map tokens to words.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, words: bool, allow_special_tokens: bool = False) -> None:
        if words and not tokenizer.is_fast:
            raise DataError(
                "task.masked_lm.whole_words: this tokenizer is written in Python and does not map tokens to "
                "words. Use one with a tokenizer.json, or write `whole_words: false`."
            )
        super().__init__(tokenizer, allow_special_tokens=allow_special_tokens)
        self._words = words
        self._special = np.array(sorted(TextTokenizer(tokenizer).special), np.int64)

    def _with(self, tokenizer: PreTrainedTokenizerBase) -> Self:
        return type(self)(tokenizer, words=self._words)

    def _encoded(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row's `text`; None if there is nothing to mask, or its error."""
        texts = [result_or_error(require_valid_unicode, row["text"]) for row in rows]
        valid = [text for text in texts if isinstance(text, str)]
        if not valid:
            return [text for text in texts if isinstance(text, DataError)]
        encoded = self._tokenizer(valid, verbose=False, return_attention_mask=False)
        words = [encoded.word_ids(index) if self._words else None for index in range(len(valid))]
        features = (self._features(ids, word_ids) for ids, word_ids in zip(encoded["input_ids"], words, strict=True))
        return [next(features) if isinstance(text, str) else text for text in texts]

    def _features(self, ids: list[int], words: list[int | None] | None) -> Features | None:
        arrays = {"input_ids": np.asarray(ids, np.uint32), "is_target": ~np.isin(ids, self._special)}
        if words is not None:
            arrays["is_word_start"] = np.array([a is None or a != b for b, a in pairwise([None, *words])], dtype=bool)
        return Features(arrays) if arrays["is_target"].any() else None


@recorded_as("data.encoding.source_target.SourceTargetEncoder")
class SourceTargetEncoder(TextRowsEncoder):
    """Encodes a source and a target: the source with the tokenizer's special tokens, followed by the target.

    The target is encoded with `text_target` and end-of-sequence; all of its tokens are targets. A chat template is not
    used. Raises DataError for a tokenizer without an end-of-sequence token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, prefix: str = "", allow_special_tokens: bool = False
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so the model cannot learn when to stop. "
                "Set `eos_token` in its tokenizer_config.json, or use another one."
            )
        super().__init__(tokenizer, allow_special_tokens=allow_special_tokens)
        self._tokens = TextTokenizer(tokenizer)
        self._prefix = prefix

    def _with(self, tokenizer: PreTrainedTokenizerBase) -> Self:
        return type(self)(tokenizer, prefix=self._control.renamed(self._prefix))

    def _texts_of(self, row: Row) -> Iterable[str]:
        return texts_in(row.get("messages") or ())

    def _encoded(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row's `messages`; None for an empty source, or the error of the row."""
        texts = [result_or_error(self._texts, row) for row in rows]
        valid = [pair for pair in texts if not isinstance(pair, DataError)]
        sources = self._tokens.begun([source for source, _ in valid])
        targets = self._targets([target for _, target in valid])
        features = (_features(source, target) for source, target in zip(sources, targets, strict=True))
        return [pair if isinstance(pair, DataError) else next(features) for pair in texts]

    def _texts(self, row: Row) -> tuple[str, str]:
        turns = row.get("messages")
        if turns is None:
            raise DataError(
                "task `seq2seq` trains on a prompt and its completion, but the row has neither. Set `format: "
                "prompt_completion` and map its columns, such as `columns: {prompt: article, completion: summary}`."
            )
        if row.get("tools") or [turn["role"] for turn in turns] != ["user", "assistant"]:
            what = "tools" if row.get("tools") else f"turns of {', '.join(turn['role'] for turn in turns)}"
            raise DataError(
                f"task `seq2seq` trains on one prompt and one completion, but the row has {what}. Write them as "
                "one text with a `template`, or use task `sft`."
            )
        prompt, completion = (turn.get("content") for turn in turns)
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise DataError("task `seq2seq` trains on text, but the content of a turn is not text. Write it as text.")
        return require_valid_unicode(self._prefix + prompt), require_valid_unicode(completion)

    def _targets(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        eos = int(self._tokenizer.eos_token_id)
        encoded = self._tokenizer(text_target=list(texts), verbose=False, return_attention_mask=False)["input_ids"]
        return [[*ids] if ids and ids[-1] == eos else [*ids, eos] for ids in encoded]


def _features(source: list[int], target: list[int]) -> Features | None:
    if not source:
        return None
    is_target = np.arange(len(source) + len(target)) >= len(source)
    return Features({"input_ids": np.asarray([*source, *target], np.uint32), "is_target": is_target})
