"""Small models: three architectures, tied and untied, with and without values."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel

from finetune.config.sections.model import FromConfigSection, ModelSection
from finetune.model.loading.architecture import SpecialTokenIds
from finetune.model.loading.load import load_model
from finetune.runtime.parameters import InitContext

VOCABULARY_SIZE = 300
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama untied": ("llama", {**GATED, "tie_word_embeddings": False}),
    "llama tied": ("llama", {**GATED, "tie_word_embeddings": True}),
    "gpt2 tied": ("gpt2", SIZES),
    "gpt2 untied": ("gpt2", {**SIZES, "tie_word_embeddings": False}),
    "qwen3 tied": ("qwen3", {**GATED, "head_dim": 8, "tie_word_embeddings": True}),
}


@pytest.fixture(params=list(ARCHITECTURES))
def architecture_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def from_config() -> Callable[..., ModelSection]:
    """Return a function that writes the `model:` section of an architecture."""

    def write(name: str = "llama untied", **keys: Any) -> ModelSection:
        model_type, values = ARCHITECTURES[name]
        return ModelSection(from_config=FromConfigSection(model_type=model_type, values=values), **keys)

    return write


@pytest.fixture(scope="session")
def build() -> Callable[..., PreTrainedModel]:
    """Return a function that loads the model of a section in the same way as a run."""

    def load(section: ModelSection, *, construction: InitContext | None = None, seed: int = 7) -> PreTrainedModel:
        return load_model(
            section,
            head="causal_lm",
            init_context=construction or InitContext(),
            seed=seed,
            vocabulary_size=VOCABULARY_SIZE,
            special_ids=SpecialTokenIds(eos=0, pad=3),
        )

    return load
