"""A scaling that a model's code does not read is found without its weights."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    RecurrentGemmaConfig,
)

from finetune.model.positions.rotary import rope_names, uses_scaling
from finetune.model.positions.upstream import written_head_size

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


def on_meta(config, scaling):
    config = type(config).from_dict({**config.to_dict(), "rope_parameters": scaling})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("config", "is_used"),
    [
        (LlamaConfig(**SIZES, intermediate_size=64), True),
        (FalconConfig(**SIZES), True),
        (FalconConfig(**SIZES, alibi=True), False),
        (RecurrentGemmaConfig(**SIZES, intermediate_size=64, lru_width=32), False),
    ],
)
def test_rope_scaling_is_detected_by_its_frequencies(config, is_used):
    usual = on_meta(config, {"rope_type": "default", "rope_theta": 1e4})
    assert not uses_scaling(usual, usual)
    assert uses_scaling(on_meta(config, LINEAR), usual) == is_used


def test_rope_scaling_of_one_layer_type_is_enough():
    config = Gemma3TextConfig(
        **SIZES, intermediate_size=64, head_dim=8, layer_types=["full_attention", "sliding_attention"]
    )
    default = {"rope_type": "default", "rope_theta": 1e4}
    usual = on_meta(config, {"full_attention": default, "sliding_attention": default})
    assert uses_scaling(on_meta(config, {"full_attention": LINEAR, "sliding_attention": default}), usual)


def test_the_names_of_scalings_are_found_in_a_text_config_too():
    assert rope_names({"attention_dropout": 0.1}) == []
    assert rope_names({"text_config": {"rope_scaling": LINEAR}}) == ["rope_scaling"]


def test_yarn_still_needs_a_head_size_in_the_config():
    """Once this fails, `written_head_size` can go."""
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    config = MixtralConfig(**SIZES, rope_parameters=yarn)
    assert config.head_dim is None
    with pytest.raises(TypeError, match="NoneType"):
        on_meta(config, yarn)
    assert written_head_size(config, yarn) == {"head_dim": 8}
    assert written_head_size(config, {"full_attention": yarn}) == {"head_dim": 8}
    assert written_head_size(config, LINEAR) == {}
    assert written_head_size(LlamaConfig(**SIZES, head_dim=16), yarn) == {}
