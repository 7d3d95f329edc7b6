"""Rows of texts without turns: the names of control tokens in them are text, too."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Self

from transformers import PreTrainedTokenizerBase

from finetune.data.encoding.attempts import attempted
from finetune.data.encoding.control_tokens import ControlTokens
from finetune.data.features import Features, Outcome
from finetune.data.rows import Row
from finetune.errors import DataError


class TextRowsEncoder:
    """Encodes rows of texts; those that hold names of control tokens by a twin whose tokenizer reads these as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, allow_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer, allowed=allow_special_tokens)

    def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row, None where there is nothing to learn, or what is wrong with it."""
        texts = [list(self._texts_of(row)) for row in rows]
        held = [place for place, each in enumerate(texts) if self._control.held_by(each)]
        if not held:
            return self._encoded(rows)
        ordinary = [place for place in range(len(rows)) if place not in set(held)]
        outcomes: list[Outcome] = [None] * len(rows)
        for place, outcome in zip(ordinary, self._encoded([rows[place] for place in ordinary]), strict=True):
            outcomes[place] = outcome
        for place, outcome in zip(held, self._twin_of([rows[place] for place in held]), strict=True):
            is_good = isinstance(outcome, Features)
            outcomes[place] = attempted(self._checked, outcome, texts[place]) if is_good else outcome
        return outcomes

    @abstractmethod
    def _encoded(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return what becomes of each row."""

    @abstractmethod
    def _with(self, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Return the same encoder with another tokenizer."""

    def _texts_of(self, row: Row) -> Iterable[str]:
        """Return the texts of the row that are encoded, as far as they are texts."""
        return (value for name in ("text", "text_pair") if isinstance(value := row.get(name), str))

    def _twin_of(self, rows: Sequence[Row]) -> list[Outcome]:
        try:
            return self._twin._encoded(rows)
        except DataError as error:
            return [error] * len(rows)

    def _checked(self, features: Features, texts: Sequence[str]) -> Features:
        self._control.check_plain(texts)
        return replace(features, has_control_names=True)

    @cached_property
    def _twin(self) -> Self:
        return self._with(self._control.tokenizer)
