"""Who asks a model for its embeddings gets an answer, though it has none."""

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, ResNetConfig, ResNetForImageClassification

from finetune.model.embeddings import input_embeddings, output_embeddings, tell_of_none


def test_a_model_of_images_has_none_and_says_so():
    model = ResNetForImageClassification(ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1]))
    assert input_embeddings(model) is None
    assert output_embeddings(model) is None
    tell_of_none(model)
    assert model.get_input_embeddings() is None  # what Accelerate's FSDP2 asks


def test_a_model_of_text_keeps_its_own():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=5))
    tell_of_none(model)
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    assert input_embeddings(model) is model.model.embed_tokens
    assert output_embeddings(model) is model.lm_head
