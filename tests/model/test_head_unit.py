"""What a sharding strategy is told of a head whose parts share a bias."""

import pytest
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from finetune.model.head_unit import whole_head

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def test_the_head_that_owns_the_bias_stands_for_its_decoder_meanwhile():
    model = BertForMaskedLM(BertConfig(vocab_size=30, **SIZES))
    decoder = model.get_output_embeddings()
    with whole_head(model):
        assert model.get_output_embeddings() is model.cls.predictions
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.get_output_embeddings() is decoder
    assert not hasattr(model.cls.predictions, "weight")


def test_a_head_of_its_own_stays_what_it_is():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=30, **SIZES))
    with whole_head(model):
        assert model.get_output_embeddings() is model.lm_head


def test_after_an_error_it_is_again_as_it_was():
    model = BertForMaskedLM(BertConfig(vocab_size=30, **SIZES))
    with pytest.raises(OSError), whole_head(model):
        raise OSError
    assert model.get_output_embeddings() is model.cls.predictions.decoder
