"""Continued pre-training: learn every token of a text."""

from collections.abc import Sequence

from finetune.data.encoding.encode import TextEncoder
from finetune.data.features import Outcome
from finetune.data.prepared.chunks import Encode
from finetune.task.causal import CausalTask
from finetune.task.expecting import OnlyText
from finetune.task.materials import Materials
from finetune.task.protocol import Row


class PretrainTask(CausalTask):
    """Predict every token of the text but the first, end-of-sequence included."""

    def __init__(self, materials: Materials) -> None:
        super().__init__(materials)
        self._encoder = OnlyText(TextEncoder(self.tokenizer))

    @property
    def encoder(self) -> Encode:
        """Return what encodes texts."""
        return self._encoder

    def encode(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return the texts' tokens; None for an empty one."""
        return self._encoder(rows)
