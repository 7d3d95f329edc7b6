"""Each type of model is made small, and keeps its kinds of layers, ties and head ratio."""

import pytest

from finetune.commands.rehearse.architecture import from_config_values, shrink_architecture
from finetune.commands.rehearse.shrink import Sizes, changed_values, shrunk_values
from finetune.config.sections.model import FromConfigSection, ModelSection
from finetune.errors import ModelError
from finetune.model.loading.architecture import SpecialTokenIds, build_model_config
from tests.model.moe_models import HYBRID_MODELS, MOE_MODELS

DECODERS = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_neo", "phi3"),
    *("falcon", "opt", "olmo2", "smollm3", "granite", "cohere2", "recurrent_gemma", "jamba", "llama4_text", "mamba"),
)
NEEDS_VALUES = {"lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8, "num_hidden_layers": 32}}
OTHERS = {
    **dict.fromkeys(("bert", "roberta", "distilbert", "modernbert", "electra"), "masked_lm"),
    **dict.fromkeys(("t5", "bart"), "seq2seq_lm"),
    **dict.fromkeys(("llava", "qwen3_vl", "gemma3"), "image_text_to_text"),
    "vit": "image_classification",
}


def small(model_type, head="causal_lm", sizes=None, **values):
    section = ModelSection(from_config=FromConfigSection(model_type=model_type, values=values))
    return shrink_architecture(section, head=head, sizes=sizes or Sizes())


@pytest.mark.parametrize("model_type", [*MOE_MODELS, *HYBRID_MODELS, *DECODERS, *OTHERS])
def test_a_model_of_default_size_is_made_small(model_type):
    found = small(model_type, OTHERS.get(model_type, "causal_lm"), **NEEDS_VALUES.get(model_type, {}))
    assert found.num_parameters > 10_000_000 and not found.is_same
    real, less = ({each.name: set(each.kinds) for each in stacks} for stacks in (found.real_stacks, found.small_stacks))
    assert real == less or model_type == "qwen3_vl"  # whose list of mergers has one member left
    assert all(real[name] == kinds for name, kinds in less.items())
    assert found.config.model_type == model_type
    assert sum(len(each.kinds) for each in found.small_stacks) <= 12


def test_ratio_of_heads_ties_switches_and_vocabulary_stay():
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


def test_experts_stay_and_no_more_than_half_of_them_are_chosen():
    config = small("qwen3_moe", num_experts=128, num_experts_per_tok=8).config
    assert (config.num_experts, config.num_experts_per_tok) == (8, 4)


def test_a_small_model_is_rehearsed_as_it_is():
    found = small(
        "llama", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=300
    )
    assert found.is_same and found.config.hidden_size == 32


def test_the_job_can_ask_for_wider_models():
    config = small("bert", "embedding", sizes=Sizes(min_width=256, multiple_of=32)).config
    assert config.hidden_size >= 256 and config.hidden_size % 32 == 0


def test_every_value_that_differs_is_named_and_makes_the_same_config_from_values():
    written = FromConfigSection(model_type="gpt2", values={"hidden_size": 1024, "n_layer": 24, "n_head": 16})
    found = small("gpt2", **written.values)
    assert {each.key for each in found.changes} == {"config.n_embd", "config.n_layer", "config.n_head"}
    again = written.model_copy(update={"values": from_config_values(written, found)})
    config = build_model_config(again, vocabulary_size=None, special_ids=SpecialTokenIds())
    assert (config.n_embd, config.n_layer, config.n_head) == (found.config.n_embd, 2, found.config.n_head)


def test_differences_are_found_at_any_depth():
    (change,) = changed_values({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})
    assert (change.key, change.was, change.now) == ("a.c", 2, 3)


def test_what_cannot_be_made_small_is_refused_with_the_reason():
    with pytest.raises(ModelError, match=r"cannot be made small here .*--set model\.name=FOLDER"):
        small("zamba2")


def test_values_of_single_layers_stay_with_the_layers_that_are_kept():
    layers = {3: {"head_dim": 256}, 1: {"head_dim": 256}}
    values = {"hidden_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 4, "head_dim": 128}
    small = shrunk_values({**values, "per_layer_config": layers}, keep={"": (0, 3)}, level=0, sizes=Sizes())
    assert (small["head_dim"], small["per_layer_config"]) == (16, {1: {"head_dim": 32}})


def test_a_value_that_the_config_computes_from_others_is_not_written():
    written = FromConfigSection(model_type="axk1", values={})
    made = shrink_architecture(ModelSection(from_config=written), head="causal_lm", sizes=Sizes())
    assert "qk_head_dim" in made.config.to_dict()
    assert "qk_head_dim" not in from_config_values(written, made)
