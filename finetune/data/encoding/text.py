"""Encode rows of plain texts: for pre-training, masked language modeling, source-target tasks, and groups of texts.

A group is one sample of concatenated sequences: an anchor and its passages, or query-passage pairs. Two texts with a
score are an anchor with one passage. The names of control tokens in all these texts are encoded as plain text.
"""

import copy
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.config.sections.data import DataSection
from finetune.data.encoding.control_tokens import ControlTokens, texts_in
from finetune.data.encoding.tokenizer import TextTokenizer, has_double_bos, require_eos_id
from finetune.data.features import CONTROL_NAMES, LENGTHS_OF_SEQUENCES, Features, Findings, Outcome, result_or_error
from finetune.data.rows import Row, require_valid_unicode
from finetune.data.token_cache.lengths import SequencesLengthLimit
from finetune.data.upstream import truncating
from finetune.errors import DataError
from finetune.registry.turns import WEIGHTS, standard_word


class TextRowsEncoder:
    """Encodes rows of texts; rows with names of control tokens use a renamed tokenizer that encodes these as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, allow_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._tokens = TextTokenizer(tokenizer)
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
        try:
            renamed = self._renamed_encoder._encoded([rows[index] for index in guarded])
        except DataError as error:
            renamed = [error] * len(guarded)
        for index, outcome in zip(guarded, renamed, strict=True):
            if isinstance(outcome, Features | tuple):
                try:
                    self._control.check_plain(texts[index])
                    outcomes[index] = outcome
                    if isinstance(outcome, Features):
                        outcomes[index] = replace(outcome, findings=outcome.findings.plus(CONTROL_NAMES))
                except DataError as error:
                    outcomes[index] = error
            else:
                outcomes[index] = outcome
        return outcomes

    @abstractmethod
    def _encoded(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the outcome of each row."""

    def _renamed(self) -> Self:
        """Return a copy of this encoder with the renamed tokenizer; raises DataError if it cannot be built."""
        renamed = copy.copy(self)
        renamed._tokenizer, renamed._tokens = self._control.tokenizer, self._control.tokens
        return renamed

    def _texts_of(self, row: Row) -> Iterable[str]:
        """Return the values of the row that are encoded and are strings."""
        return (value for name in ("text", "text_pair") if isinstance(value := row.get(name), str))

    @cached_property
    def _renamed_encoder(self) -> Self:
        return self._renamed()


class TextEncoder(TextRowsEncoder):
    """Encodes texts with the tokenizer's prefix and end-of-sequence; all tokens but the first are targets.

    Reads the `text` of each row; the outcome is None if there is nothing to predict.
    """

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
        self._special = np.array(sorted(self._tokens.special), np.int64)

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
        self._prefix = prefix

    def _renamed(self) -> Self:
        renamed = super()._renamed()
        renamed._prefix = self._control.renamed(self._prefix)
        return renamed

    def _texts_of(self, row: Row) -> Iterable[str]:
        return texts_in(row.get("messages") or ())

    def _encoded(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row's `messages`; None for an empty source, or the error of the row."""
        texts = [result_or_error(self._texts, row) for row in rows]
        valid = [pair for pair in texts if not isinstance(pair, DataError)]
        sources = self._tokens.begun([source for source, _ in valid])
        targets: list[list[int]] = []
        if valid:
            completions = [completion for _, completion in valid]
            eos = int(self._tokenizer.eos_token_id)
            encoded = self._tokenizer(text_target=completions, verbose=False, return_attention_mask=False)["input_ids"]
            targets = [[*ids] if ids and ids[-1] == eos else [*ids, eos] for ids in encoded]
        features: list[Features | None] = []
        turns = [row["messages"] for row, pair in zip(rows, texts, strict=True) if not isinstance(pair, DataError)]
        for source, target, each in zip(sources, targets, turns, strict=True):
            findings = Findings(unread_keys=frozenset(name for turn in each for name in turn) - {"role", "content"})
            ids = np.asarray([*source, *target], np.uint32)
            is_target = np.arange(len(ids)) >= len(source)
            arrays = {"input_ids": ids, "is_target": is_target}
            features.append(Features(arrays, findings=findings) if source else None)
        following = iter(features)
        return [pair if isinstance(pair, DataError) else next(following) for pair in texts]

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
        weights = [name for turn in turns for name in turn if standard_word(name) in WEIGHTS]
        if weights:
            raise DataError(
                f"a turn has `{weights[0]}`, which task `seq2seq` does not read: it trains on every completion. Leave "
                "it out of the rows, or use task `sft` with data.train_on: per_message."
            )
        prompt, completion = (turn.get("content") for turn in turns)
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise DataError("task `seq2seq` trains on text, but the content of a turn is not text. Write it as text.")
        return require_valid_unicode(self._prefix + prompt), require_valid_unicode(completion)


SCORE = "score"

Contents = Literal["passages", "scores"]
"""The columns of a row after its first text: a positive and negatives, or a second text and a score."""


@dataclass(frozen=True)
class Prompts:
    """Prefixes of queries and passages."""

    query: str = ""
    passage: str = ""


@dataclass(frozen=True)
class TextsLengthLimit(SequencesLengthLimit):
    """Applies `max_length` to each text; the encoder has already truncated texts if configured."""

    @property
    def limits(self) -> str:
        """Return the limit for messages."""
        return f"data.max_length: {self.max_length} (each text with its prompt; query and passage, if read together)"


_TYPES: Mapping[str, type[np.generic]] = {"input_ids": np.uint32, "token_type_ids": np.uint8}
"""The model inputs among the tokenizer's outputs, without the attention mask."""


@dataclass(frozen=True)
class Truncation:
    """How texts are truncated: the longer text of a pair first; special tokens are kept."""

    max_length: int  # in tokens
    side: Literal["end", "start"]

    @classmethod
    def of(cls, section: DataSection) -> Self | None:
        """Return how a job truncates texts; None if it does not."""
        return cls(section.longest, section.truncate_side) if section.over_length == "truncate" else None

    def require_room(self, tokenizer: PreTrainedTokenizerBase, *, pair: bool) -> None:
        """Raise DataError if there is no room between the special tokens."""
        if tokenizer.num_special_tokens_to_add(pair=pair) >= self.max_length:
            raise DataError(f"data.max_length: {self.max_length} leaves no room between the special tokens. Raise it.")


def arrays_in(encoded: Mapping[str, Any]) -> list[dict[str, np.ndarray]]:
    """Return the model inputs of each text in the tokenizer's output."""
    names = [name for name in _TYPES if name in encoded]
    columns = (encoded[name] for name in names)
    return [
        {name: np.asarray(values, _TYPES[name]) for name, values in zip(names, row, strict=True)}
        for row in zip(*columns, strict=True)
    ]


def framed(
    tokenizer: PreTrainedTokenizerBase, sequences: Sequence[tuple[str, ...]], cut: Truncation | None
) -> list[tuple[Mapping[str, np.ndarray], int]]:
    """Return the model inputs of each text or pair, and the number of tokens that were truncated.

    Either all sequences are pairs or none is.
    """
    if not sequences:
        return []
    results: list[tuple[Mapping[str, np.ndarray], int]] = []
    whole = arrays_in(tokenizer(*map(list, zip(*sequences, strict=True)), verbose=False))
    for texts, arrays in zip(sequences, whole, strict=True):
        lost = 0
        if cut is not None and len(arrays["input_ids"]) > cut.max_length:
            options: dict[str, Any] = {"truncation": "longest_first", "max_length": cut.max_length, "verbose": False}
            with truncating(tokenizer, cut.side):
                (shorter,) = arrays_in(tokenizer(*([text] for text in texts), **options))
            arrays, lost = shorter, len(arrays["input_ids"]) - len(shorter["input_ids"])
        results.append((arrays, lost))
    return results


class TextGroupsEncoder(TextRowsEncoder):
    """Encodes rows of several texts with the tokenizer's special tokens.

    Samples hold the concatenated `input_ids` (uint32) of all sequences, `token_type_ids` (uint8) if the tokenizer
    returns them, `sequence_lengths` (int32), and the `score` (float32, [1]) if rows have one. The sequences are the
    anchor, the positive and the negatives; with `joint`, the anchor paired with the positive and with each negative.
    With a `cut`, texts that are too long are truncated here.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        contents: Contents,
        task: str,
        joint: bool = False,
        prompts: Prompts | None = None,
        scores: tuple[float, float] | None = None,
        cut: Truncation | None = None,
        allow_special_tokens: bool = False,
    ) -> None:
        """`scores` is the range of scores that a row may have."""
        super().__init__(tokenizer, allow_special_tokens=allow_special_tokens)
        self._contents, self._task, self._joint = contents, task, joint
        self._prompts, self._scores, self._cut = prompts or Prompts(), scores, cut
        if cut is not None:
            cut.require_room(tokenizer, pair=joint)

    def of_texts(self) -> "TextsEncoder":
        """Return the encoder of texts that are in no group, with the same prompts and length."""
        return TextsEncoder(
            self._tokenizer,
            contents="passages",
            task=self._task,
            joint=self._joint,
            prompts=self._prompts,
            cut=self._cut,
            allow_special_tokens=not self._control.names,
        )

    def _renamed(self) -> Self:
        renamed, name = super()._renamed(), self._control.renamed
        renamed._prompts = Prompts(name(self._prompts.query), name(self._prompts.passage))
        return renamed

    def _texts_of(self, row: Row) -> Iterable[str]:
        values = [row.get(name) for name in ("anchor", "positive", "text", "text_pair")]
        return [value for value in (*values, *row.get("negatives", ())) if isinstance(value, str)]

    def _encoded(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row; None for a row with a blank text or without a required negative."""
        texts = [result_or_error(self._texts, row) for row in rows]
        sequences = [
            sequence for row_texts in texts if isinstance(row_texts, list) for sequence in self._sequences(row_texts)
        ]
        encoded = iter(framed(self._tokenizer, sequences, self._cut))
        outcomes: list[Outcome] = []
        for row, row_texts in zip(rows, texts, strict=True):
            if not isinstance(row_texts, list):
                outcomes.append(row_texts)
                continue
            own = [next(encoded) for _ in self._sequences(row_texts)]
            outcomes.append(_joined(own, None if self._scores is None else row["score"]))
        return outcomes

    def _texts(self, row: Row) -> list[str] | None:
        """Return the anchor and the passages; None if one of them is blank or a required negative is missing."""
        names = ("anchor", "positive") if self._contents == "passages" else ("text", "text_pair")
        if any(name not in row for name in (*names, *(() if self._scores is None else ("score",)))):
            raise DataError(_WRONG_CONTENTS[self._contents].format(task=self._task))
        if self._scores is not None:
            low, high = self._scores
            if not low <= row["score"] <= high:
                raise DataError(f"the score is {row['score']:g}, but this loss requires one from {low:g} to {high:g}.")
        texts = [require_valid_unicode(text) for text in (*(row[name] for name in names), *row.get("negatives", ()))]
        is_useless = self._joint and self._contents == "passages" and len(texts) < 3
        return None if is_useless or not all(text.strip() for text in texts) else texts

    def _sequences(self, texts: Sequence[str]) -> list[tuple[str, ...]]:
        anchor, *passages = texts
        anchor, passages = self._prompts.query + anchor, [self._prompts.passage + passage for passage in passages]
        if self._joint:
            return [(anchor, passage) for passage in passages]
        return [(passage,) for passage in (anchor, *passages)]


class TextsEncoder(TextGroupsEncoder):
    """Encodes `queries` and `passages` of rows to a sample for each text, or for each pair of them with `joint`."""

    def _texts_of(self, row: Row) -> Iterable[str]:
        return (*row["queries"], *row["passages"])

    def _encoded(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the samples of each row; None for a row with a blank text that stands alone, or its error."""
        texts = [result_or_error(self._texts_or_pairs, row) for row in rows]
        encoded = iter(
            framed(
                self._tokenizer, [each for of_row in texts if isinstance(of_row, list) for each in of_row], self._cut
            )
        )
        return [
            of_row if isinstance(of_row, DataError) else tuple(_joined([next(encoded)], None) for _ in of_row) or None
            for of_row in texts
        ]

    def _texts_or_pairs(self, row: Row) -> list[tuple[str, ...]]:
        texts = [require_valid_unicode(text) for text in self._texts_of(row)]
        queries = [self._prompts.query + text for text in texts[: len(row["queries"])]]
        passages = [self._prompts.passage + text for text in texts[len(queries) :]]
        if self._joint:
            return [(query, passage) for query in queries for passage in passages]
        return [(text,) for text in (*queries, *passages)] if all(map(str.strip, texts)) else []


_WRONG_CONTENTS: Mapping[Contents, str] = {
    "passages": "{task} trains on an anchor (or a query) and its positive with this loss, but the row has neither. Use "
    "`format: pairs` (columns `anchor`, `positive`, `negative` or `negatives`) or `format: retrieval` (`query`, ...).",
    "scores": "{task} trains on two texts and their score with this loss, but the row has no score. Use `format: "
    "scored_pairs`: columns `sentence1`, `sentence2` and `score`.",
}


def _joined(sequences: Sequence[tuple[Mapping[str, np.ndarray], int]], score: float | None) -> Features:
    arrays = [sequence for sequence, _ in sequences]
    joined = {name: np.concatenate([sequence[name] for sequence in arrays]) for name in arrays[0]}
    lengths = np.array([len(sequence["input_ids"]) for sequence in arrays], np.int32)
    score_array = {} if score is None else {SCORE: np.array([score], np.float32)}
    return Features(
        {**joined, LENGTHS_OF_SEQUENCES: lengths, **score_array}, cut_tokens=sum(lost for _, lost in sequences)
    )
