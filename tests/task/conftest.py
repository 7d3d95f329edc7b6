"""A tokenizer with the chatml template and small random models for the tests of the tasks."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from finetune.config.sections.data import DataSection, TrainingSourceSection
from finetune.data.templates.chat_template import set_chat_template

VOCABULARY_SIZE = 320
CONFIGS = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
        ),
    ),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(vocab_size=VOCABULARY_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3),
    ),
}


@pytest.fixture(scope="session")
def tokenizer():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["What is two and two?", "Two and two is four."] * 4, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
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
