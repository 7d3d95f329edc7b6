"""A tokenizer with the chatml template and small random models for the tests of the tasks."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from finetune.config.sections.data import DataSection, TrainingSourceSection
from finetune.data.templates.chat_template import set_chat_template
from tests.small_models import SMALL, byte_tokenizer

VOCABULARY_SIZE = 320
CONFIGS = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(vocab_size=VOCABULARY_SIZE, num_key_value_heads=2, initializer_range=0.3, **SMALL),
    ),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(vocab_size=VOCABULARY_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3),
    ),
}


@pytest.fixture(scope="session")
def tokenizer():
    texts = ["What is two and two?", "Two and two is four."] * 4
    made = byte_tokenizer(texts, special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], size=VOCABULARY_SIZE)
    set_chat_template(made, "chatml")
    return made


@pytest.fixture(scope="session", params=sorted(CONFIGS))
def model(request):
    torch.manual_seed(0)
    model_class, config = CONFIGS[request.param]
    return model_class(config).eval()


@pytest.fixture(scope="session")
def data():
    return DataSection(train=TrainingSourceSection(path="/nowhere/rows.jsonl"), max_length=64)
