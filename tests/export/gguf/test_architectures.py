import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from finetune.errors import ModelError
from finetune.export.gguf.architectures import find_architecture, metadata, rope_divisors
from tests.serving_folders import FAMILIES, SIZES

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def config_of(model_type: str, **values):
    return AutoConfig.for_model(model_type, **{**FAMILIES.get(model_type, SIZES), **values})


def test_divisors_of_llama_3_are_those_of_transformers():
    config = config_of("llama", rope_parameters=LLAMA3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    assert torch.allclose(plain / torch.tensor(rope_divisors(config)), scaled, rtol=1e-6)
    assert rope_divisors(config_of("llama")) is None


def test_scaled_positions_are_in_the_metadata():
    config = config_of("qwen3", rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0})
    values = metadata(find_architecture(config), config)
    assert (values["rope.scaling.type"], values["rope.scaling.factor"], values["rope.freq_base"]) == (
        "linear",
        4.0,
        5e5,
    )


@pytest.mark.parametrize(
    ("model_type", "values", "reason"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "scaled by `dynamic`",
        ),
        ("gemma2", {"query_pre_attn_scalar": 24}, "`query_pre_attn_scalar` is 24"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "sliding window of 64 otherwise"),
        ("mistral", {"sliding_window": 128}, "sliding window of 128 otherwise"),
        ("bert", {}, "`bert` models are not among"),
    ],
)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(model_type, values, reason):
    with pytest.raises(ModelError, match=reason):
        find_architecture(config_of(model_type, **values))


def test_a_window_longer_than_the_context_is_no_window():
    assert find_architecture(config_of("mistral", sliding_window=512)).name == "llama"
