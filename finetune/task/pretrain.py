"""Continued pre-training: learn every token of a text."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from finetune.config.sections.data import DataSection
from finetune.data.encode import TextEncoder
from finetune.data.features import Outcome
from finetune.errors import DataError
from finetune.task.causal import CausalTask
from finetune.task.protocol import Row


class PretrainTask(CausalTask):
    """Predict every token of the text but the first, end-of-sequence included."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataSection) -> None:
        super().__init__(tokenizer, data)
        self._encode = TextEncoder(tokenizer)

    def encode(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return the texts' tokens; None for an empty one."""
        if any(row.keys() != {"text"} for row in rows):  # all rows of a source have one format
            what = "a label" if "label" in rows[0] else "turns"
            wrong = f"task `pretrain` learns from plain text, but the row has {what}. Use task `sft`, or format `text`."
            return [DataError(wrong)] * len(rows)
        return self._encode([row["text"] for row in rows])
