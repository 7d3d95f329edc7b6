"""Emulated 8-bit products with frozen weights: their results, their gradients, and weights that stay unchanged."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config.sections.model import LoraSection
from finetune.config.sections.train import Fp8Section, TrainSection
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from finetune.model.adapters.single_pass import use_single_pass
from finetune.model.kernels import float8

IDS = torch.arange(1, 25)[None]
EMULATED = Fp8Section(emulate=True)


def adapted_llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))
    adapted = add_adapter(model, LoraSection(rank=8, alpha=16.0), AdapterContext(seed=1))
    use_single_pass(adapted, in_place=True)
    return adapted.train()


def frozen_layer(**values):
    torch.manual_seed(1)
    layer = nn.Linear(48, 32, **values).requires_grad_(False)
    float8.multiply_in_8_bits(layer, emulate=True)
    return layer


def losses_of_steps(model, *, num_steps, learning_rate=1e-2):
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=learning_rate)
    losses = []
    for _ in range(num_steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_product_and_the_gradient_of_its_inputs_are_within_the_rounding_of_3_bits():
    layer, rows = frozen_layer(), torch.randn(2, 5, 48, requires_grad=True)
    output = layer(rows)
    plain = nn.functional.linear(rows, layer.weight, layer.bias)
    assert output.shape == plain.shape and not torch.equal(output, plain)
    assert (output - plain).norm() < 0.05 * plain.norm()
    weights = torch.randn_like(plain)
    one, other = (torch.autograd.grad((result * weights).sum(), rows)[0] for result in (output, plain))
    assert 0 < (one - other).norm() < 0.05 * other.norm()


def test_the_weight_is_cast_once_and_again_after_a_change(monkeypatch):
    layer, rows, cast = frozen_layer(bias=False), torch.randn(4, 48), float8.cast_rows
    shapes = []
    monkeypatch.setattr(float8, "cast_rows", lambda rows: shapes.append(tuple(rows.shape)) or cast(rows))
    first = layer(rows)
    assert torch.equal(layer(rows), first)
    assert shapes.count((32, 48)) == 1
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.allclose(layer(rows), 2 * first)
    assert shapes.count((32, 48)) == 2


def test_frozen_layers_of_adapted_models_need_no_torchao_and_train_as_in_bf16():
    plain = adapted_llama()
    model = copy.deepcopy(plain)
    before = {name: each.clone() for name, each in model.state_dict().items() if "lora_" not in name}
    assert float8.convert_linear_layers(model.get_base_model(), EMULATED, casts_frozen=True) == 14
    expected, losses = (losses_of_steps(each, num_steps=12) for each in (plain, model))
    assert losses != expected
    assert losses == pytest.approx(expected, rel=0.02)
    assert expected[-1] < 0.9 * expected[0]
    after = model.state_dict()
    assert before.keys() < after.keys() and all(torch.equal(after[name], values) for name, values in before.items())
    with torch.no_grad():  # evaluation reads the weights as they are
        plain.load_state_dict(after)
        assert torch.equal(model.eval()(input_ids=IDS).logits, plain.eval()(input_ids=IDS).logits)


def test_the_kernel_computes_the_emulated_numbers(monkeypatch):
    """Torch has it for CPUs, too; on a GPU it needs operands by rows and by columns."""
    kernel, calls = torch._scaled_mm, []

    def scaled_mm(one, other, **options):
        assert one.is_contiguous() and other.t().is_contiguous()
        calls.append((options["scale_a"].shape, options["scale_b"].shape))
        return kernel(one, other, **options)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    layer = frozen_layer().bfloat16()
    rows = torch.randn(5, 48, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for emulate in (True, False):
        float8.multiply_in_8_bits(layer, emulate=emulate)
        output = layer(rows)
        results.append((output, *torch.autograd.grad(output.square().sum(), rows)))
    assert calls == [((5, 1), (1, 32)), ((5, 1), (1, 48))]
    for one, other in zip(*results, strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.allclose(one, other, rtol=0.01)


def test_frozen_weights_are_cast_once_only_where_they_are_whole_and_stay_frozen():
    train = TrainSection(global_batch_size=1, microbatch_size=1, steps=1, learning_rate=0.1, precision="fp8")
    assert float8.casts_frozen_weights(train, strategy="ddp", compiled="off")
    assert not float8.casts_frozen_weights(train, strategy="fsdp2", compiled="off")
    assert not float8.casts_frozen_weights(train, strategy="ddp", compiled="regional")
    half = train.model_copy(update={"precision": "bf16"})
    assert not float8.casts_frozen_weights(half, strategy="ddp", compiled="off")
