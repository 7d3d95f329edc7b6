"""`task:` - what is learnt from a row."""

from typing import Literal

from finetune.config.section import Section, key


class TaskSection(Section):
    """What is learnt from a row."""

    name: Literal["sft", "pretrain"] = key(
        "`sft`: predict the assistant's turns, end-of-turn included. `pretrain`: predict every token of the text."
    )
