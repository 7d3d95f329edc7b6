"""Heads of classes: what the config of a model is told, and which of its modules are the head's."""

import pytest
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    DistilBertConfig,
    Gemma3Config,
    LlamaConfig,
)

from finetune.config.sections.model import FromConfigSection
from finetune.errors import ModelError
from finetune.model.loading.architecture import SpecialTokenIds, build_model_config, new_head_modules, set_config_values

SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
DISTIL = {"dim": 8, "hidden_dim": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 16}


def test_a_config_is_told_its_classes():
    config = BertConfig()
    names = {0: "cold", 1: "luke", 2: "warm"}
    set_config_values(config, {"num_labels": 3, "id2label": names, "pad_token_id": 7})
    assert (config.num_labels, config.id2label, config.pad_token_id) == (3, names, 7)


def test_the_part_about_text_is_told_the_padding_that_its_classifier_looks_for():
    config = Gemma3Config(text_config={"hidden_size": 8}, vision_config={"hidden_size": 8})
    set_config_values(config, {"pad_token_id": 7, "num_labels": 3})
    assert config.get_text_config().pad_token_id == 7
    assert config.num_labels == 3


@pytest.mark.parametrize(
    ("config", "auto", "modules"),
    [
        (BertConfig(**SMALL), AutoModelForSequenceClassification, ("classifier",)),
        (DistilBertConfig(**DISTIL), AutoModelForSequenceClassification, ("pre_classifier", "classifier")),
        (LlamaConfig(**SMALL), AutoModelForSequenceClassification, ("score",)),
        (LlamaConfig(**SMALL), AutoModelForTokenClassification, ("score",)),
    ],
)
def test_the_modules_of_a_new_head_are_known(config, auto, modules):
    assert new_head_modules(auto.from_config(config), head="token_classification") == modules
    assert new_head_modules(auto.from_config(config), head="causal_lm") == ()


TEXT = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}
VISION = {"model_type": "clip_vision_model", "hidden_size": 32, "num_attention_heads": 4}


def built(**values):
    section = FromConfigSection(model_type="llava", values=values)
    return build_model_config(section, vocabulary_size=300, special_ids=SpecialTokenIds(bos=None, eos=7, pad=8))


def test_vocabulary_and_special_tokens_are_those_of_the_text_part():
    config = built(text_config=TEXT, vision_config=VISION)
    text = config.get_text_config()
    assert (text.vocab_size, text.bos_token_id, text.eos_token_id, text.pad_token_id) == (300, None, 7, 8)
    assert (text.hidden_size, config.vision_config.hidden_size) == (32, 32)


def test_a_text_part_that_is_not_written_has_the_vocabulary_too():
    assert built(vision_config=VISION).text_config.vocab_size == 300


WRONG = {
    "text_config.vocab_size: 200 is smaller": {"text_config": {**TEXT, "vocab_size": 200}},
    "text_config.hiden_size: the config of `llama` has no such value. Did you mean `hidden_size`": {
        "text_config": {"model_type": "llama", "hiden_size": 32}
    },
    "vision_config.pach_size: the config of `clip_vision_model`": {"vision_config": {**VISION, "pach_size": 8}},
    "vision_config.dtype: write `model.dtype` instead": {"vision_config": {**VISION, "dtype": "float32"}},
    "values.vocab_size: the config of `llava` has no such value": {"vocab_size": 300},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_value_that_a_part_does_not_know_is_refused(message):
    with pytest.raises(ModelError) as raised:
        built(**WRONG[message])
    assert message in str(raised.value)
