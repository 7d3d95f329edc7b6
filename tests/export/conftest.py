"""Small trained-looking models, and an export of them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from finetune.config.sections.export import ExportSection
from finetune.config.sections.model import FromConfigSection, ModelSection
from finetune.data.templates.chat_template import set_chat_template, stop_ids
from finetune.export.card import CardFacts
from finetune.export.save import ExportReport, Preprocessors, TextPreprocessor, export_model
from finetune.export.verify import verifier
from finetune.model.loading.architecture import SpecialTokenIds
from finetune.model.loading.load import load_model
from finetune.runtime.parameters import InitContext
from tests.small_models import byte_tokenizer
from tests.verifier_server import use_server

use_server(verifier)

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama untied": ("llama", {**GATED, "tie_word_embeddings": False}),
    "gpt2 tied": ("gpt2", SIZES),
    "qwen3 tied": ("qwen3", {**GATED, "head_dim": 8, "tie_word_embeddings": True}),
}
FACTS = CardFacts("gsm8k", "sft", num_steps=1200, metrics={"loss": 0.5}, config_text="run:\n  seed: 42\n")


@pytest.fixture(params=list(ARCHITECTURES))
def architecture_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 260 tokens, without a merge."""
    return make_tokenizer([])


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    made = byte_tokenizer(texts, special=special, size=30_000, pad_token=special[3])
    made.add_special_tokens({"additional_special_tokens": special[1:3]})
    set_chat_template(made, "chatml")
    return made


@pytest.fixture
def build(tokenizer: PreTrainedTokenizerFast) -> Callable[..., PreTrainedModel]:
    def load(name: str = "llama untied", **keys: Any) -> PreTrainedModel:
        model_type, values = ARCHITECTURES[name]
        section = ModelSection(from_config=FromConfigSection(model_type=model_type, values=values), **keys)
        return load_from(section)

    return load


@pytest.fixture
def load_folder() -> Callable[..., PreTrainedModel]:
    return lambda folder, **keys: load_from(ModelSection(name=str(folder), **keys))


def load_from(section: ModelSection, *, vocabulary_size: int = 260) -> PreTrainedModel:
    return load_model(
        section,
        head="causal_lm",
        init_context=InitContext(),
        seed=7,
        vocabulary_size=vocabulary_size,
        special_ids=SpecialTokenIds(eos=0, pad=3),
    )


@pytest.fixture
def export(tmp_path, tokenizer: PreTrainedTokenizerFast) -> Callable[..., ExportReport]:
    """Return a function that exports a model's own values, or others, into `final/`."""

    def write(model: nn.Module, weights: dict[str, Tensor] | None = None, **keys: Any) -> ExportReport:
        return export_model(
            tmp_path / "final",
            model=model,
            weights=values_of(model) if weights is None else weights,
            preprocessors=Preprocessors(TextPreprocessor(tokenizer, stop_ids(tokenizer))),
            section=ExportSection(**keys),
            facts=FACTS,
        )

    return write


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter once, as gathering gives them: tied ones under one of their names."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture
def batch() -> Tensor:
    return torch.arange(4, 28).reshape(2, 12)
