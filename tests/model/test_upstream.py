"""Who asks a model for its embeddings gets an answer, though it has none."""

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from finetune.model.upstream import (
    allow_missing_embeddings,
    head_as_one_unit,
    input_embeddings,
    keep_own_no_split_modules,
    output_embeddings,
    unify_tied_embeddings,
)


def test_a_model_of_images_has_none_and_says_so():
    model = ResNetForImageClassification(ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1]))
    assert input_embeddings(model) is None
    assert output_embeddings(model) is None
    allow_missing_embeddings(model)
    assert model.get_input_embeddings() is None  # what Accelerate's FSDP2 asks


def test_a_model_of_text_keeps_its_own():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=5))
    allow_missing_embeddings(model)
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    assert input_embeddings(model) is model.model.embed_tokens
    assert output_embeddings(model) is model.lm_head


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def test_the_head_that_owns_the_bias_stands_for_its_decoder_meanwhile():
    model = BertForMaskedLM(BertConfig(vocab_size=30, **SIZES))
    decoder = model.get_output_embeddings()
    with head_as_one_unit(model):
        assert model.get_output_embeddings() is model.cls.predictions
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.get_output_embeddings() is decoder
    assert not hasattr(model.cls.predictions, "weight")


def test_a_head_of_its_own_stays_what_it_is():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=30, **SIZES))
    with head_as_one_unit(model):
        assert model.get_output_embeddings() is model.lm_head


def test_after_an_error_it_is_again_as_it_was():
    model = BertForMaskedLM(BertConfig(vocab_size=30, **SIZES))
    with pytest.raises(OSError), head_as_one_unit(model):
        raise OSError
    assert model.get_output_embeddings() is model.cls.predictions.decoder


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
    unify_tied_embeddings(model)
    assert model.get_encoder().embed_tokens is model.get_decoder().embed_tokens is model.get_input_embeddings()
    assert torch.equal(model(**given).logits, before)
    assert set(model.state_dict()) == saved


def test_tables_that_are_not_one_weight_stay_apart():
    model = t5(tie_word_embeddings=True)
    own = torch.nn.Embedding(30, 16)
    model.encoder.embed_tokens = own
    unify_tied_embeddings(model)
    assert model.encoder.embed_tokens is own


def test_a_layer_that_holds_the_table_is_none_that_may_not_be_cut():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForMaskedLM(BertConfig(vocab_size=30, **sizes))
    assert "BertEmbeddings" in model._no_split_modules
    keep_own_no_split_modules(model)
    assert set(model._no_split_modules) == {"BertLayer"}
