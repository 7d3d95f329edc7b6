"""Classification heads: the values set in the model's config, and the modules that belong to the head."""

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    DistilBertConfig,
    Gemma3Config,
    LlamaConfig,
    PreTrainedModel,
)

from finetune.config.sections.model import FromConfigSection
from finetune.errors import ModelError
from finetune.model.loading.architecture import (
    SpecialTokenIds,
    build_model_config,
    check_decoder_start,
    new_head_modules,
    set_config_values,
)
from finetune.task.model_inputs import decoder_input_ids
from tests.refusals import refused

SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
DISTIL = {"dim": 8, "hidden_dim": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 16}


def test_the_padding_token_is_set_in_the_text_config_of_a_composite_model():
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


def test_a_default_text_config_gets_the_tokenizer_s_vocabulary():
    assert built(vision_config=VISION).text_config.vocab_size == 300


WRONG = {
    "text_config.vocab_size": {"text_config": {**TEXT, "vocab_size": 200}},
    "text_config.hiden_size": {"text_config": {"model_type": "llama", "hiden_size": 32}},
    "vision_config.pach_size": {"vision_config": {**VISION, "pach_size": 8}},
    "vision_config.dtype": {"vision_config": {**VISION, "dtype": "float32"}},
    "values.vocab_size": {"vocab_size": 300},
}


@pytest.mark.parametrize("key", WRONG)
def test_a_value_that_a_part_does_not_know_is_refused(key):
    with refused(ModelError, f"{key}: "):
        built(**WRONG[key])


TINY_SEQ2SEQ = {
    **{"vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_layers": 1, "num_heads": 4},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37},
    **{"d_kv": 8, "d_ff": 37, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "num_experts": 4},
    **{"max_position_embeddings": 64, "expert_capacity": 64},
}


def seq2seq_model(model_type: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type]()
    for name, value in {**TINY_SEQ2SEQ, **changes}.items():
        if hasattr(config, name) or name == "decoder_start_token_id":
            setattr(config, name, value)
    return AutoModelForSeq2SeqLM.from_config(config).eval()


@pytest.mark.parametrize("model_type", ["bart", "m2m_100", "nllb-moe", "blenderbot", "mbart", "t5", "longt5"])
def test_decoder_inputs_equal_those_that_the_model_derives_from_labels(model_type: str):
    model = seq2seq_model(model_type)
    check_decoder_start(model)
    source, labels = torch.randint(3, 99, (2, 16)), torch.randint(3, 99, (2, 12))
    labels[1, 8:] = -100
    with torch.no_grad():
        expected = model(input_ids=source, labels=labels.clone()).loss
        logits = model(input_ids=source, decoder_input_ids=decoder_input_ids(model, labels)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("model_type", ["longt5", "switch_transformers", "m2m_100"])
def test_a_decoder_whose_first_token_is_not_known_is_refused(model_type: str):
    with refused(ModelError, "`decoder_start_token_id`"):
        check_decoder_start(seq2seq_model(model_type, decoder_start_token_id=None))
