"""Supervised fine-tuning: learn the assistant's turns of a conversation, the end of each turn included."""

import numpy as np

from finetune.data.encoding.chat import require_chat_template
from finetune.data.encoding.encode import ConversationEncoder
from finetune.data.features import Features
from finetune.data.prepared.chunks import Encode
from finetune.task.causal import CausalTask
from finetune.task.expecting import OnlyTurns
from finetune.task.materials import Materials
from finetune.task.protocol import Prompt


class SftTask(CausalTask):
    """Predict the assistant's turns, end-of-turn included; raises DataError for a tokenizer without chat template."""

    def __init__(self, materials: Materials) -> None:
        require_chat_template(materials.tokenizer)
        super().__init__(materials)
        self._encoder = self._make_encoder()

    def _make_encoder(self) -> Encode:
        data = self.data
        encode = ConversationEncoder(
            self.tokenizer,
            train_on=data.train_on,
            system_prompt=data.system_prompt,
            template=data.chat_template,
            allow_special_tokens=data.allow_special_tokens,
        )
        return OnlyTurns(encode)

    def prompt(self, features: Features) -> Prompt | None:
        """Return all tokens before the last answer, and that answer as learnt: with its end-of-turn token."""
        is_target = features.arrays["is_target"]
        end = int(np.flatnonzero(is_target)[-1]) + 1
        before = np.flatnonzero(~is_target[:end])
        start = int(before[-1]) + 1
        ids = features.arrays["input_ids"].tolist()
        return Prompt(input_ids=tuple(ids[:start]), reference_ids=tuple(ids[start:end]))
