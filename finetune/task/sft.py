"""Supervised fine-tuning: learn the assistant's turns of a conversation, the end of each turn included."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.config.sections.data import DataSection
from finetune.data.chat import require_chat_template
from finetune.data.encode import encode_turns, with_system_prompt
from finetune.data.features import Features
from finetune.errors import DataError
from finetune.task.causal import CausalTask
from finetune.task.protocol import Prompt, Row


class SftTask(CausalTask):
    """Predict the assistant's turns, end-of-turn included; raises DataError for a tokenizer without chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataSection) -> None:
        require_chat_template(tokenizer)
        super().__init__(tokenizer, data)

    def encode_row(self, row: Row) -> Features | None:
        """Return the rendered conversation, or None when the assistant has no turn in it."""
        if "messages" not in row:
            raise DataError(
                "task `sft` learns from turns, but the row is plain text. Use task `pretrain`, or another format."
            )
        return encode_turns(with_system_prompt(row["messages"], self.data.system_prompt), self.tokenizer)

    def prompt(self, features: Features) -> Prompt | None:
        """Return all tokens before the last answer, and that answer as learnt: with its end-of-turn token."""
        is_target = features.arrays["is_target"]
        end = int(np.flatnonzero(is_target)[-1]) + 1
        before = np.flatnonzero(~is_target[:end])
        start = int(before[-1]) + 1
        ids = features.arrays["input_ids"].tolist()
        return Prompt(input_ids=tuple(ids[:start]), reference_ids=tuple(ids[start:end]))
