"""Texts of which words will be hidden: their tokens, and where each word begins."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.encoding.attempts import attempted
from finetune.data.encoding.text_rows import TextRowsEncoder
from finetune.data.encoding.tokens import Tokens
from finetune.data.features import Features, Outcome
from finetune.data.rows import Row, well_formed
from finetune.errors import DataError
from finetune.runtime.recorded import recorded_as


@recorded_as("data.encoding.masked_text.MaskedTextEncoder")
class MaskedTextEncoder(TextRowsEncoder):
    """Encodes texts with the special tokens that the tokenizer puts around them.

    `is_target` marks the tokens that may be hidden, which special ones never are; with `words`, `is_word_start` marks
    the first token of each word. Raises DataError for a tokenizer that does not know words.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, words: bool, allow_special_tokens: bool = False) -> None:
        if words and not tokenizer.is_fast:
            raise DataError(
                "task.masked_lm.whole_words: this tokenizer, written in Python, does not tell which tokens are one "
                "word. Use one with a tokenizer.json, or write `whole_words: false`."
            )
        super().__init__(tokenizer, allow_special_tokens=allow_special_tokens)
        self._words = words
        self._special = np.array(sorted(Tokens(tokenizer).special), np.int64)

    def _with(self, tokenizer: PreTrainedTokenizerBase) -> Self:
        return type(self)(tokenizer, words=self._words)

    def _encoded(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row's `text`; None where there is nothing to hide, or what is wrong with it."""
        texts = [attempted(well_formed, row["text"]) for row in rows]
        right = [text for text in texts if isinstance(text, str)]
        if not right:
            return [text for text in texts if isinstance(text, DataError)]
        encoded = self._tokenizer(right, verbose=False, return_attention_mask=False)
        words = [encoded.word_ids(place) if self._words else None for place in range(len(right))]
        made = (self._features(ids, each) for ids, each in zip(encoded["input_ids"], words, strict=True))
        return [next(made) if isinstance(text, str) else text for text in texts]

    def _features(self, ids: list[int], words: list[int | None] | None) -> Features | None:
        arrays = {"input_ids": np.asarray(ids, np.uint32), "is_target": ~np.isin(ids, self._special)}
        if words is not None:
            arrays["is_word_start"] = np.array([a is None or a != b for b, a in pairwise([None, *words])], dtype=bool)
        return Features(arrays) if arrays["is_target"].any() else None
