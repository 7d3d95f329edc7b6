"""Continued pre-training: learn every token of a text."""

from finetune.data.encoding.text import TextEncoder
from finetune.task.causal import CausalTask
from finetune.task.expecting import OnlyText
from finetune.task.materials import Materials


class PretrainTask(CausalTask):
    """Predict every token of the text but the first, end-of-sequence included."""

    def __init__(self, materials: Materials) -> None:
        super().__init__(materials)
        self._encoder = OnlyText(TextEncoder(self.tokenizer, allow_special_tokens=materials.data.allow_special_tokens))
