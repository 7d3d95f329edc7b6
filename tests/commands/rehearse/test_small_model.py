"""Every type of model is made small, and keeps its kinds of layers, ties and head ratio."""

import pytest

from finetune.commands.rehearse.small_model import from_config_values, shrink_architecture
from finetune.config.sections.model import FromConfigSection, ModelSection
from finetune.errors import ModelError
from finetune.model.loading.architecture import SpecialTokenIds, build_model_config
from tests.model.moe_models import HYBRID_MODELS, MOE_MODELS

DECODERS = [
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_neo", "phi3"),
    *("falcon", "opt", "olmo2", "smollm3", "granite", "cohere2", "recurrent_gemma", "jamba", "llama4_text", "mamba"),
]
NEEDS_VALUES = {"lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8, "num_hidden_layers": 32}}
OTHERS = {
    **dict.fromkeys(("bert", "roberta", "distilbert", "modernbert", "electra"), "masked_lm"),
    **dict.fromkeys(("t5", "bart"), "seq2seq_lm"),
    **dict.fromkeys(("llava", "qwen3_vl", "gemma3"), "image_text_to_text"),
    "vit": "image_classification",
}


def small(model_type, head="causal_lm", **values):
    section = ModelSection(from_config=FromConfigSection(model_type=model_type, values=values))
    return shrink_architecture(section, head=head)


@pytest.mark.parametrize("model_type", [*MOE_MODELS, *HYBRID_MODELS, *DECODERS, *OTHERS])
def test_a_model_of_default_size_is_made_small(model_type):
    found = small(model_type, OTHERS.get(model_type, "causal_lm"), **NEEDS_VALUES.get(model_type, {}))
    assert found.num_parameters > 10_000_000 and found.changes
    real, less = (
        {stack.name: set(stack.kinds) for stack in stacks} for stacks in (found.real_stacks, found.small_stacks)
    )
    assert real == less or model_type == "qwen3_vl"  # whose list of mergers has one member left
    assert all(real[name] == kinds for name, kinds in less.items())
    assert found.config.model_type == model_type
    assert sum(len(stack.kinds) for stack in found.small_stacks) <= 12


def test_a_small_model_keeps_ratio_of_heads_ties_switches_and_vocabulary():
    sizes = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28}
    found = small(
        "qwen2",
        **sizes,
        tie_word_embeddings=True,
        vocab_size=152_064,
        sliding_window=4096,
        use_sliding_window=True,
        max_window_layers=21,
    )
    config = found.config
    assert config.num_attention_heads / config.num_key_value_heads == 7
    assert config.tie_word_embeddings and config.vocab_size == 152_064 and config.sliding_window == 4096
    assert {"full_attention", "sliding_attention"} == set(config.layer_types)


def test_a_small_mixture_keeps_eight_experts_and_chooses_at_most_half_of_them():
    config = small("qwen3_moe", num_experts=128, num_experts_per_tok=8).config
    assert (config.num_experts, config.num_experts_per_tok) == (8, 4)


def test_a_model_below_three_million_parameters_is_not_changed():
    found = small(
        "llama", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=300
    )
    assert not found.changes and found.config.hidden_size == 32


def test_every_changed_value_is_listed_and_builds_the_small_config():
    written = FromConfigSection(model_type="gpt2", values={"hidden_size": 1024, "n_layer": 24, "n_head": 16})
    found = small("gpt2", **written.values)
    assert {change.key for change in found.changes} == {"config.n_embd", "config.n_layer", "config.n_head"}
    again = written.model_copy(update={"values": from_config_values(written, found)})
    config = build_model_config(again, vocabulary_size=None, special_ids=SpecialTokenIds())
    assert (config.n_embd, config.n_layer, config.n_head) == (found.config.n_embd, 2, found.config.n_head)


def test_a_model_that_cannot_be_made_small_is_refused_with_the_reason():
    with pytest.raises(ModelError, match=r"cannot be reduced .*--set model\.name=FOLDER"):
        small("zamba2")


def test_a_value_that_the_config_computes_is_not_written_into_the_job():
    written = FromConfigSection(model_type="axk1", values={})
    made = shrink_architecture(ModelSection(from_config=written), head="causal_lm")
    assert "qk_head_dim" in made.config.to_dict()
    assert "qk_head_dim" not in from_config_values(written, made)
