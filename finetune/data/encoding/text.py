"""Texts become token ids, all of them targets."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.encoding.attempts import attempted
from finetune.data.encoding.ends import begins_twice, end_of_sequence
from finetune.data.encoding.text_rows import TextRowsEncoder
from finetune.data.encoding.tokens import Tokens
from finetune.data.features import Features, Outcome
from finetune.data.rows import Row, well_formed
from finetune.errors import DataError
from finetune.runtime.recorded import recorded_as


@recorded_as("data.encoding.text.TextEncoder")
class TextEncoder(TextRowsEncoder):
    """Encodes texts as the tokenizer begins them, ended by end-of-sequence; all tokens but the first are targets.

    Of each row the `text`; None when nothing is left to predict.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, allow_special_tokens: bool = False) -> None:
        super().__init__(tokenizer, allow_special_tokens=allow_special_tokens)
        self._tokens = Tokens(tokenizer)

    def _with(self, tokenizer: PreTrainedTokenizerBase) -> Self:
        return type(self)(tokenizer)

    def _encoded(self, rows: Sequence[Row]) -> list[Outcome]:
        texts = [attempted(well_formed, row["text"]) for row in rows]
        begun = iter(self._tokens.begun([text for text in texts if isinstance(text, str)]))
        return [attempted(self._features, next(begun)) if isinstance(text, str) else text for text in texts]

    def _features(self, ids: list[int]) -> Features | None:
        tokenizer = self._tokenizer
        if not ids or ids == [tokenizer.bos_token_id]:
            return None
        if begins_twice(ids, tokenizer):
            raise DataError(
                f"begins with {tokenizer.bos_token}, which the tokenizer writes itself: it would stand there twice."
            )
        if ids[-1] != end_of_sequence(tokenizer):
            ids = [*ids, end_of_sequence(tokenizer)]
        is_target = np.ones(len(ids), dtype=bool)
        is_target[0] = False
        return Features({"input_ids": np.asarray(ids, dtype=np.uint32), "is_target": is_target})


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> Features | None:
    """Return the features of one text, or None when nothing is left to predict; raises DataError."""
    (outcome,) = _text_encoder(tokenizer)([{"text": text}])
    if isinstance(outcome, DataError):
        raise outcome
    return outcome


_text_encoder = lru_cache(maxsize=4)(TextEncoder)
