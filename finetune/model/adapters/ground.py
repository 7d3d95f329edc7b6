"""What adapters stand on: facts of the run that their making needs beside their own section."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.runtime.construction import Construction


@dataclass(frozen=True)
class Ground:
    """Facts that decide which adapters are made and with which first values."""

    seed: int
    head: str = "causal_lm"
    revision: str | None = None  # of the base, recorded for the export
    construction: Construction = field(default_factory=Construction)
    tokenizer: Any = None  # None for images alone
    new_ids: Sequence[int] = ()  # tokens that the model is given before training
    base: str | None = None  # where the weights as they were before quantisation lie
