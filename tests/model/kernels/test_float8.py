"""Emulated 8-bit products of linear layers: the converted layers, their results, and weights that stay unchanged."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("torchao", reason="torchao is not installed: it prints to stderr in every run")

from finetune.config.sections.model import LoraSection
from finetune.config.sections.train import Fp8Section
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from finetune.model.kernels import float8

RECIPES = ("tensorwise", "rowwise")
IDS = torch.arange(1, 25)[None]


def emulated(recipe="tensorwise"):
    return Fp8Section(recipe=recipe, emulate=True)


def small_llama(**values):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **{**sizes, **values}))


def converted_names(model):
    return {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "linear_mm_config")}


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_rounded_to_8_bits_in_training_and_not_in_evaluation(recipe):
    plain = small_llama()
    model = copy.deepcopy(plain)
    assert float8.convert_linear_layers(model, emulated(recipe)) == 14
    losses = [each.train()(input_ids=IDS, labels=IDS).loss for each in (plain, model)]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=0.02)
    assert losses[1].item() != losses[0].item()
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (one.grad - other.grad).norm() < 0.25 * one.grad.norm(), name
        assert one.grad.dtype == other.grad.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=IDS).logits, plain.eval()(input_ids=IDS).logits)


def test_modules_parameters_and_their_names_stay():
    model = small_llama()
    parameters, modules = dict(model.named_parameters()), list(model.modules())
    float8.convert_linear_layers(model, emulated())
    assert list(model.modules()) == modules
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert len(parameters) == len(list(model.parameters()))


def test_head_adapters_routers_and_odd_sizes_stay_in_bf16():
    model = add_adapter(small_llama(intermediate_size=72), LoraSection(rank=16, alpha=16.0), AdapterContext(seed=1))
    base = model.get_base_model()
    base.model.layers[0].gate = nn.Linear(32, 16)
    assert float8.convert_linear_layers(base, emulated()) == 8  # not gate_proj, up_proj and down_proj
    assert converted_names(model) == {"base_layer"}
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    assert all(each.grad is not None for name, each in model.named_parameters() if ".lora_B." in name)
    assert not hasattr(base.lm_head, "linear_mm_config")


def test_under_autocast_inputs_are_rounded_to_bfloat16_first():
    model = small_llama().train()
    float8.convert_linear_layers(model, emulated())
    layer, inputs = model.model.layers[0].self_attn.q_proj, torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(inputs).dtype == torch.bfloat16
        assert layer.eval()(inputs).dtype == torch.bfloat16
    assert layer.train()(inputs).dtype == torch.float32


def test_a_cpu_lacks_what_is_needed_unless_products_are_emulated():
    assert "compute capability 8.9" in float8.missing_fp8_requirement(torch.device("cpu"), Fp8Section())
    assert float8.missing_fp8_requirement(torch.device("cpu"), emulated()) is None


@pytest.mark.parametrize(("capability", "is_missing"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_gpus_older_than_ada_are_refused(monkeypatch, capability, is_missing):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (float8.missing_fp8_requirement(torch.device("cuda"), Fp8Section()) is not None) is is_missing


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def losses_of_steps(model, optimizer, *, then=lambda: None):
    losses = []
    for number in range(4):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if number == 1:
            then()
    return losses


def test_fsdp2_gathers_8_bits_with_the_scales_of_the_last_update(mesh, monkeypatch):
    """After other changes of a weight, such as loading a checkpoint, its scale is computed again."""

    def halve(model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

    whole, sharded = small_llama().train(), small_llama().train()
    for model in (whole, sharded):
        float8.convert_linear_layers(model, emulated())
    for block in (*sharded.model.layers, sharded):
        fully_shard(block, mesh=mesh)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (whole, sharded)]
    assert float8.gather_in_8_bits(sharded, optimizers[1]) == 14
    seen = set()
    layer = sharded.model.layers[0].mlp.up_proj
    multiply = layer.forward
    monkeypatch.setattr(layer, "forward", lambda rows: seen.add(type(layer.weight.data).__name__) or multiply(rows))
    expected = losses_of_steps(whole, optimizers[0], then=lambda: halve(whole))
    assert losses_of_steps(sharded, optimizers[1], then=lambda: halve(sharded)) == pytest.approx(expected, rel=1e-6)
    assert seen == {"Float8TrainingTensor"}
    for (name, one), other in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        assert type(other.to_local()) is torch.Tensor and torch.allclose(one, other.full_tensor(), atol=1e-6), name


def test_weights_with_a_scale_per_row_are_gathered_as_they_are(mesh):
    model = small_llama().train()
    float8.convert_linear_layers(model, emulated("rowwise"))
    fully_shard(model, mesh=mesh)
    assert float8.gather_in_8_bits(model, torch.optim.AdamW(model.parameters())) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_kernels_compute_what_is_emulated(recipe):
    device = torch.device("cuda")
    section = Fp8Section(recipe=recipe)
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if (missing := float8.missing_fp8_requirement(device, section)) is not None:
        pytest.skip(f"needs {missing}")
    losses = []
    for each in (section, emulated(recipe)):
        model = small_llama().to(device, torch.bfloat16).train()
        float8.convert_linear_layers(model, each)
        losses.append(model(input_ids=IDS.to(device), labels=IDS.to(device)).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
