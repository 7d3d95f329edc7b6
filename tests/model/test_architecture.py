"""A config of parts: what is about text stands in its text part, and every part's values are checked by name."""

import pytest

from finetune.config.sections.model import FromConfigSection
from finetune.errors import ModelError
from finetune.model.architecture import SpecialIds, architecture

TEXT = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}
VISION = {"model_type": "clip_vision_model", "hidden_size": 32, "num_attention_heads": 4}


def built(**values):
    section = FromConfigSection(model_type="llava", values=values)
    return architecture(section, vocabulary_size=300, special_ids=SpecialIds(bos=None, eos=7, pad=8))


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
