"""A question and its answer become the source that an encoder reads and the target that a decoder writes."""

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.encoding.attempts import attempted
from finetune.data.encoding.control_tokens import texts_in
from finetune.data.encoding.text_rows import TextRowsEncoder
from finetune.data.encoding.tokens import Tokens
from finetune.data.features import Features, Outcome
from finetune.data.rows import Row, well_formed
from finetune.errors import DataError
from finetune.runtime.recorded import recorded_as


@recorded_as("data.encoding.source_target.SourceTargetEncoder")
class SourceTargetEncoder(TextRowsEncoder):
    """Encodes one exchange: the source as the tokenizer begins and ends a text, behind it the target.

    The target is what the tokenizer makes of a text to be written, ended by end-of-sequence; all of it is learnt. A
    chat template is not used. Raises DataError for a tokenizer without an end-of-sequence token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, prefix: str = "", allow_special_tokens: bool = False
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-sequence token, so the model could not learn where to stop.")
        super().__init__(tokenizer, allow_special_tokens=allow_special_tokens)
        self._tokens = Tokens(tokenizer)
        self._prefix = prefix

    def _with(self, tokenizer: PreTrainedTokenizerBase) -> Self:
        return type(self)(tokenizer, prefix=self._control.renamed(self._prefix))

    def _texts_of(self, row: Row) -> Iterable[str]:
        return texts_in(row.get("messages") or ())

    def _encoded(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row's `messages`; None for an empty source, or what is wrong with the row."""
        texts = [attempted(self._texts, row) for row in rows]
        right = [each for each in texts if not isinstance(each, DataError)]
        sources = self._tokens.begun([source for source, _ in right])
        targets = self._targets([target for _, target in right])
        made = (_features(source, target) for source, target in zip(sources, targets, strict=True))
        return [each if isinstance(each, DataError) else next(made) for each in texts]

    def _texts(self, row: Row) -> tuple[str, str]:
        turns = row.get("messages")
        if turns is None:
            raise DataError(
                "task `seq2seq` learns from a prompt and its completion, but the row has neither. Set `format: "
                "prompt_completion` and map its columns, such as `columns: {prompt: article, completion: summary}`."
            )
        if row.get("tools") or [turn["role"] for turn in turns] != ["user", "assistant"]:
            what = "tools" if row.get("tools") else f"turns of {', '.join(turn['role'] for turn in turns)}"
            raise DataError(
                f"task `seq2seq` learns from one prompt and one completion, but the row has {what}. Write them as "
                "one text with a `template`, or use task `sft`."
            )
        asked, answered = (turn.get("content") for turn in turns)
        if not isinstance(asked, str) or not isinstance(answered, str):
            raise DataError("task `seq2seq` learns from texts, but the content of a turn is none. Write it as text.")
        return well_formed(self._prefix + asked), well_formed(answered)

    def _targets(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        end = int(self._tokenizer.eos_token_id)
        written = self._tokenizer(text_target=list(texts), verbose=False, return_attention_mask=False)["input_ids"]
        return [[*ids] if ids and ids[-1] == end else [*ids, end] for ids in written]


def _features(source: list[int], target: list[int]) -> Features | None:
    if not source:
        return None
    is_target = np.arange(len(source) + len(target)) >= len(source)
    return Features({"input_ids": np.asarray([*source, *target], np.uint32), "is_target": is_target})
