"""Continued pre-training: learn every token of a text."""

from finetune.data.encode import encode_text
from finetune.data.features import Features
from finetune.errors import DataError
from finetune.task.causal import CausalTask
from finetune.task.protocol import Row


class PretrainTask(CausalTask):
    """Predict every token of the text but the first, end-of-sequence included."""

    def encode_row(self, row: Row) -> Features | None:
        """Return the text's tokens, or None when it is empty."""
        if "text" not in row:
            raise DataError(
                "task `pretrain` learns from plain text, but the row has turns. Use task `sft`, or format `text`."
            )
        return encode_text(row["text"], self.tokenizer)
