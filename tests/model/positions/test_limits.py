"""How many positions a model has, and what a sample beyond them does to the others of its forward pass."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    RobertaConfig,
)

from finetune.model.positions.limits import Positions, positions_of, table_size

SIZES = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64},
    "max_position_embeddings": 32,
}
ORIGIN = {"original_max_position_embeddings": 32}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGIN},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGIN},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0, **ORIGIN},
}
BY_LENGTH = {"dynamic", "longrope"}


def llama(scaling):
    return LlamaConfig(**SIZES, rope_parameters={**SCALINGS[scaling], "rope_theta": 10000.0})


def packed_alone(scaling, lengths):
    """Return the largest difference between the logits of samples that share a row and of each alone."""
    torch.manual_seed(0)
    config = llama(scaling)
    config.initializer_range = 0.3
    model = AutoModelForCausalLM.from_config(config).eval()
    samples = [torch.randint(0, 64, (1, length)) for length in lengths]
    with torch.no_grad():
        alone = []
        for sample in samples:
            fresh = AutoModelForCausalLM.from_config(config).eval()
            fresh.load_state_dict(model.state_dict())
            alone.append(fresh(sample, position_ids=torch.arange(sample.shape[1])[None]).logits)
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        together = model(torch.cat(samples, dim=1), position_ids=places, use_cache=False).logits
    return (torch.cat(alone, dim=1) - together).abs().max().item()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_long_sample_changes_the_others_of_its_row_only_where_the_scaling_is_by_length(scaling):
    assert packed_alone(scaling, [20, 32, 9]) < 1e-5  # none is beyond the positions
    beyond = packed_alone(scaling, [20, 60, 9])
    assert beyond > 1e-2 if scaling in BY_LENGTH else beyond < 1e-5


@pytest.mark.parametrize("scaling", SCALINGS)
def test_position_limits_include_the_length_up_to_which_scaling_is_batch_independent(scaling):
    found = positions_of(llama(scaling))
    if scaling in BY_LENGTH:
        assert found == Positions(32, 32, is_rotary=True, by_length=scaling, same_up_to=32)
    else:
        assert found == Positions(128 if scaling in ("yarn", "llama3") else 32, 32, is_rotary=True)


def test_longrope_changes_at_the_length_of_pre_training():
    scaling = {**SCALINGS["longrope"], "rope_theta": 1e4}
    config = Phi3Config(
        **{**SIZES, "max_position_embeddings": 128}, original_max_position_embeddings=32, rope_parameters=scaling
    )
    assert positions_of(config) == Positions(128, 32, is_rotary=True, by_length="longrope", same_up_to=32)


def test_each_kind_of_layer_is_looked_at():
    config = Gemma3TextConfig(**SIZES, head_dim=8)
    config.rope_parameters["full_attention"] = {**SCALINGS["dynamic"], "rope_theta": 1e4}
    assert positions_of(config).by_length == "dynamic"


TABLES = {
    "gpt2": (
        GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, n_positions=32, bos_token_id=1, eos_token_id=2),
        32,
    ),
    "bert": (BertConfig(**SIZES), 32),
    "roberta": (RobertaConfig(**SIZES, pad_token_id=1), 30),
    "opt": (OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32), 32),
    "bart": (BartConfig(**SIZES, d_model=32, encoder_layers=1, decoder_layers=1), 32),
    "llama": (LlamaConfig(**SIZES), None),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_positions_is_found_with_its_usable_length(name):
    config, length = TABLES[name]
    model = AutoModel.from_config(config).eval()
    assert table_size(model) == length
    for size in (32, 33) if length is None else (length, length + 1):
        ids = torch.full((1, size), 5)
        if length is None or size <= length:
            model(input_ids=ids)
        else:
            with pytest.raises((IndexError, RuntimeError)):
                model(input_ids=ids)


def test_models_without_positions_have_none():
    assert positions_of(AutoConfig.for_model("mamba2")) is None
    assert positions_of(AutoConfig.for_model("t5")) is None
    assert not positions_of(TABLES["gpt2"][0]).is_rotary
