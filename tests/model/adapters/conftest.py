"""Contexts for adapters, and models with trained adapters."""

from collections.abc import Callable

import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterConfig, AdapterContext

VOCABULARY_SIZE = 300


class Letters:
    """A tokenizer with one token per letter."""

    def __len__(self) -> int:
        return VOCABULARY_SIZE

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.fixture
def adapted() -> Callable[..., PeftModel]:
    """Return a function that gives a model adapters; with `noise`, as they are after training."""

    def make(model: PreTrainedModel, wish: AdapterConfig, *, noise: float = 0.0, seed: int = 1) -> PeftModel:
        made = add_adapter(model, wish, AdapterContext(seed=seed, tokenizer=Letters()))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
        return made.eval()

    return make
