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

from finetune.model.heads import head_modules, set_values

SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
DISTIL = {"dim": 8, "hidden_dim": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 16}


def test_a_config_is_told_its_classes():
    config = BertConfig()
    names = {0: "cold", 1: "luke", 2: "warm"}
    set_values(config, {"num_labels": 3, "id2label": names, "pad_token_id": 7})
    assert (config.num_labels, config.id2label, config.pad_token_id) == (3, names, 7)


def test_the_part_about_text_is_told_the_padding_that_its_classifier_looks_for():
    config = Gemma3Config(text_config={"hidden_size": 8}, vision_config={"hidden_size": 8})
    set_values(config, {"pad_token_id": 7, "num_labels": 3})
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
    assert head_modules(auto.from_config(config), head="token_classification") == modules
    assert head_modules(auto.from_config(config), head="causal_lm") == ()
