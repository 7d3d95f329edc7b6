"""The arithmetic of a trained token, against a hand-made count and against what torch counts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, T5Config, T5ForConditionalGeneration

from finetune.run.setup.patches import attended_tokens, device_price, flops_per_token, peak_flops

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 320}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LAYER = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64
NORMS = 5 * 32
HEAD = 320 * 32


def llama(**changes):
    config = LlamaConfig(**SIZES, **HEADS, attn_implementation="eager", **changes)
    return AutoModelForCausalLM.from_config(config)


def test_full_training_takes_six_per_weight_and_the_attention():
    attention = 12 * 2 * 32 * 64
    assert flops_per_token(llama(), attended=64) == 6 * (2 * LAYER + NORMS + HEAD) + attention
    assert flops_per_token(llama(tie_word_embeddings=True), attended=64) == flops_per_token(llama(), attended=64)


def test_frozen_weights_take_four():
    model = llama()
    model.model.requires_grad_(requires_grad=False)
    assert flops_per_token(model, attended=0) == 4 * (2 * LAYER + NORMS + HEAD) + 2 * HEAD


def test_torch_counts_the_same_in_a_real_step():
    model, ids = llama(), torch.randint(0, 320, (2, 64))
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids, labels=ids).loss.backward()
    assert flops_per_token(model, attended=64) == pytest.approx(counted.get_total_flops() / ids.numel(), rel=0.01)


def test_a_token_passes_its_own_experts_alone():
    config = MixtralConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2)
    attention, router, expert = 32 * 32 * 2 + 2 * 32 * 16, 4 * 32, 3 * 32 * 64
    passed = 2 * (attention + router + 2 * expert) + NORMS + HEAD
    assert flops_per_token(AutoModelForCausalLM.from_config(config), attended=0) == 6 * passed


def test_flops_of_models_whose_tokens_pass_different_weights_are_unknown():
    assert flops_per_token(torch.nn.Linear(2, 2), attended=1) is None
    small = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    assert flops_per_token(T5ForConditionalGeneration(small), attended=1) is None


def test_a_token_attends_over_the_sample_that_it_is_in():
    samples = SimpleNamespace(lengths_of=np.array([10, 30, 99]).__getitem__)
    training = SimpleNamespace(samples=samples, order=SimpleNamespace(samples=np.arange))
    assert attended_tokens(training, SimpleNamespace(num_positions=2, microbatch_size=1)) == (100 + 900) / 40


def test_a_cpu_has_no_peak():
    assert peak_flops(torch.device("cpu"), precision="bf16", world=8) is None


@pytest.mark.parametrize(("precision", "switch", "dtype"), [("bf16", "highest", "bf16"), ("fp32", "high", "tf32")])
def test_the_peak_is_that_of_the_dtype_of_the_products(monkeypatch, precision, switch, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: switch)
    found = peak_flops(torch.device("cuda"), precision=precision, world=8)
    assert found == pytest.approx(8 * {"bf16": 989e12, "tf32": 494.5e12}[dtype], rel=0.01)


def test_the_price_of_a_device_is_the_one_that_is_stated_or_the_lowest_of_its_kind(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    known = device_price(gpu, stated=None)
    assert 0.5 < known["usd_per_hour"] < 10 and "on demand" in known["source"]
    assert device_price(gpu, stated=9.0) == {"usd_per_hour": 9.0, "source": "report.price_per_device_hour"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "somebody's own")
    assert device_price(gpu, stated=None) == device_price(torch.device("cpu"), stated=None) == {}
