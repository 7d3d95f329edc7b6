"""Tables and layers as a sharding strategy wants them: one module for one weight, no layer that holds the table."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from finetune.model.layers import name_own_layers, share_input_embeddings


def t5(**values):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=30, **sizes, **values))


def bart(**values):
    sizes = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = BartConfig(vocab_size=30, d_model=16, encoder_layers=1, decoder_layers=1, **sizes, **values)
    return BartForConditionalGeneration(config)


@pytest.mark.parametrize("build", [t5, bart, lambda: bart(scale_embedding=True)])
def test_encoder_and_decoder_read_the_one_table_and_answer_as_before(build):
    torch.manual_seed(0)
    model = build().eval()
    ids = torch.tensor([[5, 6, 7]])
    given = {"input_ids": ids, "decoder_input_ids": ids}
    before, saved = model(**given).logits, set(model.state_dict())
    share_input_embeddings(model)
    assert model.get_encoder().embed_tokens is model.get_decoder().embed_tokens is model.get_input_embeddings()
    assert torch.equal(model(**given).logits, before)
    assert set(model.state_dict()) == saved


def test_tables_that_are_not_one_weight_stay_apart():
    model = t5(tie_word_embeddings=True)
    own = torch.nn.Embedding(30, 16)
    model.encoder.embed_tokens = own
    share_input_embeddings(model)
    assert model.encoder.embed_tokens is own


def test_a_layer_that_holds_the_table_is_none_that_may_not_be_cut():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForMaskedLM(BertConfig(vocab_size=30, **sizes))
    assert "BertEmbeddings" in model._no_split_modules
    name_own_layers(model)
    assert set(model._no_split_modules) == {"BertLayer"}
