"""Words and their tags become tokens; the first token of each word carries its tag."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.classes import Classes
from finetune.data.encoding.labelled_text import LABELS, arrays_in
from finetune.data.encoding.text import TextRowsEncoder
from finetune.data.features import Features, Outcome, result_or_error
from finetune.data.rows import Row, require_valid_unicode
from finetune.errors import DataError
from finetune.runtime.files.recorded_names import recorded_as

Encoded = tuple[np.ndarray, Mapping[str, np.ndarray]]
"""The number of the word that each token is of, -1 for special ones, and what the model is given."""


@recorded_as("data.encoding.tagged.TaggedEncoder")
class TaggedWordsEncoder(TextRowsEncoder):
    """Encodes sentences that are cut into words, with the tokenizer's special tokens.

    Samples hold `input_ids` (uint32), `token_type_ids` (uint8) where the tokenizer makes them, `is_target` (bool) and
    `labels` (int32), all of one length: a target is the first token of a word, its label the index of the word's tag.
    A word that leaves no token becomes the unknown one, so that each word counts. Words behind the first have a blank
    before them where the tokenizer would join them otherwise (GPT-2, RoBERTa). Raises DataError for a tokenizer that
    cannot tell which word a token is of.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, classes: Classes, *, allow_special_tokens: bool = False
    ) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"the tokenizer ({type(tokenizer).__name__}) is written in Python and cannot tell which word a token "
                "is of. Name a model or `model.tokenizer` with a `tokenizer.json`."
            )
        super().__init__(tokenizer, allow_special_tokens=allow_special_tokens)
        self._classes = classes
        probe = tokenizer(["ab", "cd"], is_split_into_words=True, add_special_tokens=False)["input_ids"]
        self._before = " " if "abcd" in tokenizer.decode(probe).lower() else ""

    def _with(self, tokenizer: PreTrainedTokenizerBase) -> Self:
        return type(self)(tokenizer, self._classes)

    def _texts_of(self, row: Row) -> Iterable[str]:
        words: Iterable[str] = row.get("tokens", ())
        return words

    def _encoded(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row; None for one without words, or what is wrong with it."""
        tags = [result_or_error(self._tags, row) for row in rows]
        good = [place for place, each in enumerate(tags) if isinstance(each, np.ndarray) and len(each)]
        outcomes: list[Outcome] = [each if isinstance(each, DataError) else None for each in tags]
        for place, encoded in zip(good, self._tokenized([rows[place]["tokens"] for place in good]), strict=True):
            outcomes[place] = result_or_error(self._features, rows[place]["tokens"], tags[place], encoded)
        return outcomes

    def _tags(self, row: Row) -> np.ndarray:
        """Return the index of each word's tag."""
        found = tags_of(row)
        for word in row["tokens"]:
            require_valid_unicode(word)
        return np.array([self._classes.index(tag) for tag in found], np.int32)

    def _features(self, words: Sequence[str], tags: np.ndarray, encoded: Encoded) -> Features:
        lost = set(range(len(words))) - set(encoded[0].tolist())
        if lost:
            (encoded,) = self._tokenized([self._without_lost(words, lost)])
        word_of, arrays = encoded
        is_target = (word_of >= 0) & (word_of != np.append(-1, word_of[:-1]))
        labels = np.where(is_target, tags[word_of], 0).astype(np.int32)
        return Features({**arrays, "is_target": is_target, LABELS: labels})

    def _tokenized(self, sentences: Sequence[Sequence[str]]) -> list[Encoded]:
        if not sentences:
            return []
        blanks = [[words[0], *(f"{self._before}{word}" for word in words[1:])] for words in sentences]
        encoded = self._tokenizer(blanks, is_split_into_words=True, verbose=False)
        numbers = ([-1 if word is None else word for word in encoded.word_ids(n)] for n in range(len(sentences)))
        return [(np.array(each, np.int64), arrays) for each, arrays in zip(numbers, arrays_in(encoded), strict=True)]

    def _without_lost(self, words: Sequence[str], lost: set[int]) -> list[str]:
        unknown = self._tokenizer.unk_token
        if unknown is None or self._tokenizer.unk_token_id in (None, self._tokenizer.eos_token_id):
            word = min(lost)
            raise DataError(
                f"word {word + 1} ({words[word]!r}) leaves no token, and the tokenizer has none for unknown words. "
                "Remove it and its tag."
            )
        return [unknown if number in lost else word for number, word in enumerate(words)]


def tags_of(row: Row) -> Sequence[Any]:
    """Return the tags of a row; raises DataError for a row of another format."""
    if "tags" not in row:
        raise DataError("this task trains on tagged words. Use `format: tagged`: columns `tokens` and `tags`.")
    return list(row["tags"])
