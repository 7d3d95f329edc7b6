"""How the exported model generates: it stops where an answer ends, and pads with its own padding token."""

import copy
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Language:
    """How text becomes tokens, and the tokens that end an answer."""

    tokenizer: PreTrainedTokenizerBase
    stop_ids: Collection[int]


@dataclass(frozen=True)
class Inputs:
    """What the model's inputs are made with; images alone have no language, text alone has no processor."""

    language: Language | None
    processor: Any = None

    def save(self, folder: Path) -> None:
        """Write tokenizer and processor into the folder, so that transformers loads them from there."""
        for part in (self.language.tokenizer if self.language else None, self.processor):
            if part is not None:
                part.save_pretrained(folder)


def generation_config(original: GenerationConfig, language: Language) -> GenerationConfig:
    """Return the model's own settings with the tokenizer's ids: every token that ends an answer ends the generation.

    Settings that contradict one another, which transformers refuses to save, are left out.
    """
    config = copy.deepcopy(original)
    try:
        config.validate(strict=True)
    except ValueError:
        config = GenerationConfig()
    stops = sorted(language.stop_ids)
    config.bos_token_id = language.tokenizer.bos_token_id
    config.eos_token_id = stops[0] if len(stops) == 1 else stops or None
    config.pad_token_id = language.tokenizer.pad_token_id
    return config
