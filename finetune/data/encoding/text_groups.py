"""Encode several texts as one sample of concatenated sequences: an anchor and its passages, or query-passage pairs.

Two texts with a score are encoded as an anchor with one passage.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from finetune.data.encoding.labelled_text import Truncation, arrays_of
from finetune.data.encoding.text import TextRowsEncoder
from finetune.data.encoding.tokenizer import require_eos_id
from finetune.data.features import LENGTHS_OF_SEQUENCES, Features, Outcome, result_or_error
from finetune.data.rows import Row, require_valid_unicode
from finetune.data.token_cache.lengths import SequencesLengthLimit
from finetune.data.upstream import fast_backend, truncating
from finetune.errors import DataError
from finetune.runtime.files.digests import recorded_as

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


@recorded_as("data.encoding.text_groups.TextGroupsEncoder")
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
        if cut is not None and tokenizer.num_special_tokens_to_add(pair=joint) >= cut.max_length:
            raise DataError(f"data.max_length: {cut.max_length} leaves no room between the special tokens. Raise it.")

    def _with(self, tokenizer: PreTrainedTokenizerBase) -> Self:
        renamed = self._control.renamed
        return type(self)(
            tokenizer,
            contents=self._contents,
            task=self._task,
            joint=self._joint,
            prompts=Prompts(renamed(self._prompts.query), renamed(self._prompts.passage)),
            scores=self._scores,
            cut=self._cut,
        )

    def _texts_of(self, row: Row) -> Iterable[str]:
        values = [row.get(name) for name in ("anchor", "positive", "text", "text_pair")]
        return [value for value in (*values, *row.get("negatives", ())) if isinstance(value, str)]

    def _encoded(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row; None for a row with a blank text or without a required negative."""
        texts = [result_or_error(self._texts, row) for row in rows]
        sequences = [
            sequence for row_texts in texts if isinstance(row_texts, list) for sequence in self._sequences(row_texts)
        ]
        encoded = iter(self._framed(sequences))
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

    def _framed(self, sequences: Sequence[tuple[str, ...]]) -> list[tuple[Mapping[str, np.ndarray], int]]:
        """Return the arrays of each sequence, and the number of tokens that were truncated."""
        whole = arrays_of(self._tokenizer, *map(list, zip(*sequences, strict=True))) if sequences else []
        return [self._shortened(texts, arrays) for texts, arrays in zip(sequences, whole, strict=True)]

    def _shortened(
        self, texts: tuple[str, ...], whole: Mapping[str, np.ndarray]
    ) -> tuple[Mapping[str, np.ndarray], int]:
        cut, length = self._cut, len(whole["input_ids"])
        if cut is None or length <= cut.max_length:
            return whole, 0
        with truncating(self._tokenizer, cut.side):
            options: dict[str, Any] = {"truncation": "longest_first", "max_length": cut.max_length}
            (arrays,) = arrays_of(self._tokenizer, *([text] for text in texts), **options)
        return arrays, length - len(arrays["input_ids"])


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


def append_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the tokenizer append end-of-sequence to every text, also when it is saved and loaded again.

    Raises DataError for a tokenizer without such a token, or one that cannot be changed.
    """
    eos = require_eos_id(tokenizer)
    if ends_with_eos(tokenizer):
        return
    backend, settings = fast_backend(tokenizer), tokenizer.init_kwargs
    if "add_bos_token" in settings or "add_eos_token" in settings:  # then loading rebuilds the post-processor
        settings["add_eos_token"] = True
        tokenizer.add_eos_token = True
    elif backend is not None:
        name = str(tokenizer.eos_token)
        last = processors.TemplateProcessing(
            single=f"$A:0 {name}:0", pair=f"$A:0 $B:1 {name}:1", special_tokens=[(name, eos)]
        )
        before = backend.post_processor
        backend.post_processor = last if before is None else processors.Sequence([before, last])
    if not ends_with_eos(tokenizer):
        raise DataError(
            f"task.embedding.pooling: `last_token` reads the end-of-sequence token, and this tokenizer "
            f"({type(tokenizer).__name__}) cannot be made to append it. Use one with a tokenizer.json, or `mean`."
        )


def ends_with_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer appends end-of-sequence to every text."""
    ids = list(tokenizer("a b", verbose=False)["input_ids"])
    return bool(ids) and ids[-1] == tokenizer.eos_token_id
