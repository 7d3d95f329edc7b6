import pytest

from finetune.config.sections.model import FromConfigSection
from finetune.errors import ModelError
from finetune.model.loading.architecture import SpecialTokenIds, build_model_config
from tests.refusals import refused


def config_of(model_type="llama", **values):
    section = FromConfigSection(model_type=model_type, values=values)
    return build_model_config(section, vocabulary_size=300, special_ids=SpecialTokenIds(eos=0, pad=3))


def test_the_vocabulary_and_special_tokens_are_the_tokenizer_s():
    config = config_of(hidden_size=64)
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id, config.pad_token_id) == (300, None, 0, 3)
    assert config.hidden_size == 64


def test_a_padded_vocabulary_is_accepted_and_a_smaller_one_is_rejected():
    assert config_of(vocab_size=320).vocab_size == 320
    with refused(ModelError, "values.vocab_size: 299", "300 tokens"):
        config_of(vocab_size=299)


def test_values_have_the_names_that_the_model_type_or_transformers_gives_them():
    assert config_of("gpt2", n_embd=64).hidden_size == 64
    assert config_of("gpt2", hidden_size=64).n_embd == 64
    assert config_of(rope_theta=5e4).rope_parameters["rope_theta"] == 5e4


@pytest.mark.parametrize(
    ("model_type", "values", "fact"),
    [
        ("lama", {}, "`llama`"),
        ("llama", {"hiden_size": 64}, "`hidden_size`"),
        ("llama", {"dtype": "bfloat16"}, "values.dtype"),
        ("llama", {"hidden_size": "64"}, "'hidden_size'"),
        ("llama", {"hidden_size": 65, "num_attention_heads": 4}, "(65)"),
    ],
)
def test_config_values_that_transformers_ignores_or_fails_on_are_one_message(model_type, values, fact):
    with refused(ModelError, "model.from_config", fact):
        config_of(model_type, **values)


@pytest.mark.parametrize(("model_type", "start"), [("t5", 3), ("bart", 0), ("pegasus", 3)])
def test_a_decoder_starts_with_the_token_that_its_default_config_uses(model_type, start):
    assert config_of(model_type).decoder_start_token_id == start  # the tokenizer's padding, or its end of text
    assert config_of(model_type, decoder_start_token_id=7).decoder_start_token_id == 7


def test_a_first_token_that_the_config_requires_and_the_tokenizer_lacks_is_its_last_one():
    assert config_of("cwm").bos_token_id == 0
