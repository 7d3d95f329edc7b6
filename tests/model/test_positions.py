"""The number of positions of a model, and the effect of a longer sample on the others of its forward pass."""

import pytest
import torch
from torch import nn
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
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from finetune.model.loading.config_values import Positions, positions_of
from finetune.model.loading.dry_run import table_size
from finetune.model.loading.load import keep_positions_exact
from tests.devices import EVERY_DEVICE

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


def test_positions_are_read_for_every_layer_type():
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


@pytest.fixture(autouse=True)
def switch():
    """Restore torch's switch after the test."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def angles(device, *, is_protected):
    module = LlamaRotaryEmbedding(LlamaConfig(hidden_size=256, num_attention_heads=2, num_key_value_heads=2)).to(device)
    model = nn.Sequential(module)
    if is_protected:
        keep_positions_exact(model)
    places = torch.tensor([[0, 1, 2047, 4097, 16385, 131071]], device=device)
    return module(torch.zeros(1, 6, 256, device=device), places)


@EVERY_DEVICE
def test_positions_are_exact_with_tf32_on(device, figure):
    places = torch.tensor([0, 1, 2047, 4097, 16385, 131071], dtype=torch.float64)
    frequencies = 10000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    exact = torch.outer(places, frequencies).cos()
    torch.set_float32_matmul_precision("high")
    cosines, _ = angles(device, is_protected=True)
    assert torch.get_float32_matmul_precision() == "high"
    error = (cosines[0, :, :64].double().cpu() - exact).abs().max().item()
    figure(
        f"error of a position's cosine under TF32 ({device})", error, at_most=0.02
    )  # of float32 angles up to 131,071


def test_products_are_exact_within_the_forward_of_positions_alone():
    seen = []

    class SomeRotaryEmbedding(nn.Module):
        def forward(self, places):
            seen.append(torch.get_float32_matmul_precision())
            if places is None:
                raise ValueError("no positions")
            return places

    model = nn.Sequential(SomeRotaryEmbedding())
    keep_positions_exact(model)
    torch.set_float32_matmul_precision("high")
    model(torch.ones(2))
    with pytest.raises(ValueError, match="no positions"):
        model(None)
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")
    model(torch.ones(2))
    assert torch.get_float32_matmul_precision() == "highest"
    assert seen == ["highest"] * 3
