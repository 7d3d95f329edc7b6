"""The tokenizer that AutoTokenizer loads for a model type, which is also the one that training uses."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from finetune.errors import ModelError
from finetune.model.processing import HOSTILE_TEXTS, as_loaded_for
from tests.refusals import refused

TYPES = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe"),
    *("qwen3_5_moe_text", "mixtral", "mistral", "ministral3", "gpt_oss", "deepseek_v3", "glm4", "glm4_moe", "olmo3"),
    *("olmoe", "granitemoe", "granitemoehybrid", "gemma3n_text", "gemma4_text", "lfm2", "falcon_h1", "mamba2"),
    *("modernbert", "gpt2", "bert", "roberta", "t5", "gemma2", "phi3", "smollm3", "lfm2_moe"),
)
WITH_A_CLASS_OF_THEIR_OWN = {"qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"}
TEXTS = ["the cat sat on the mat while 12 dogs slept", "the dog ate the cat's hat", "2026-11-23, 12345 times"] * 9


def tokenizer(model, trainer, pre_tokenizer, decoder=None):
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        backend.decoder = decoder
    backend.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", pad_token="</s>")


@pytest.fixture(scope="module")
def bytes_and_digits():
    """Return a byte-level BPE that splits digits and adds a space before every text."""
    cuts = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=True)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["</s>", "<unk>"], initial_alphabet=alphabet)
    return tokenizer(models.BPE(), trainer, cuts, decoders.ByteLevel())


@pytest.fixture(scope="module")
def pieces():
    """Return a unigram model as SentencePiece writes it."""
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=["</s>", "<unk>"], unk_token="<unk>")
    return tokenizer(models.Unigram(), trainer, pre_tokenizers.Metaspace(), decoders.Metaspace())


def require_same_tokens_after_export(made, model_type, folder):
    made.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = AutoTokenizer.from_pretrained(folder)
    assert len(HOSTILE_TEXTS) > 60
    assert all(made(text)["input_ids"] == loaded(text)["input_ids"] for text in HOSTILE_TEXTS)


@pytest.mark.parametrize("model_type", TYPES)
def test_training_reads_texts_as_the_exported_folder_does(bytes_and_digits, model_type, tmp_path):
    used, text = as_loaded_for(bytes_and_digits, model_type=model_type, trust_remote_code=False)
    assert (text is not None) is (model_type in WITH_A_CLASS_OF_THEIR_OWN)
    require_same_tokens_after_export(used, model_type, tmp_path)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_vocabulary_that_the_class_cannot_use_is_refused(pieces, model_type, tmp_path):
    if model_type in WITH_A_CLASS_OF_THEIR_OWN:
        with refused(ModelError, f"`{model_type}`"):
            as_loaded_for(pieces, model_type=model_type, trust_remote_code=False)
        return
    used, _ = as_loaded_for(pieces, model_type=model_type, trust_remote_code=False)
    require_same_tokens_after_export(used, model_type, tmp_path)
