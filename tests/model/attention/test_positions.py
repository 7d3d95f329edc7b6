"""Positions are exact whatever TF32 is for other products."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from finetune.model.attention.positions import keep_positions_exact
from tests.devices import EVERY_DEVICE


@pytest.fixture(autouse=True)
def switch():
    """Leave torch's switch as it was."""
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
