"""LoRA on routed experts as grouped products equals peft's results without a matrix of the experts' size."""

import copy
from unittest.mock import patch

import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.config.sections.model import LoraSection
from finetune.model.adapters import build
from finetune.model.adapters.products import GroupedExperts, group_expert_adapters
from finetune.model.upstream import adapters_disabled, missing_grouped_kernel
from tests.model.moe_models import HYBRID_MODELS, MOE_MODELS

MODELS = {**MOE_MODELS, "granitemoehybrid": HYBRID_MODELS["granitemoehybrid"]}
LORA = LoraSection(rank=8, alpha=16.0, rank_pattern={"gate_up_proj": 3})
IDS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(3))


def plain_model(model_type, **keys):
    torch.manual_seed(0)
    values = {"vocab_size": 300, "eos_token_id": 0, **MODELS[model_type]}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values), **keys)


@pytest.fixture
def both(adapted):
    """Return a function that gives the model with grouped adapters and the same one with peft's."""

    def make(model_type):
        grouped = adapted(plain_model(model_type), LORA, noise=0.2)
        with patch.object(build, "group_expert_adapters", lambda model: 0):
            return grouped, adapted(plain_model(model_type), LORA, noise=0.2)

    return make


def wrappers_of(model, kind):
    return [module for module in model.modules() if type(module) is kind]


def loss_and_gradients(model):
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return loss.item(), gradients


@pytest.mark.parametrize("model_type", MODELS)
def test_loss_and_gradients_are_those_of_peft(both, model_type):
    grouped, plain = both(model_type)
    num_layers = len(wrappers_of(grouped, GroupedExperts))
    assert num_layers in (1, 2) and not wrappers_of(plain, GroupedExperts)
    loss, gradients = loss_and_gradients(grouped)
    expected_loss, expected = loss_and_gradients(plain)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradients.keys() == expected.keys()
    assert sum(".experts." in name for name in gradients) == 4 * num_layers
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-6), name
        assert gradient.abs().max() > 0, name
    assert grouped.state_dict().keys() == plain.state_dict().keys()


def test_disabled_and_merged_adapters_are_left_to_peft(both):
    grouped, _ = both("gpt_oss")
    base = plain_model("gpt_oss").eval()
    with torch.no_grad():
        adapted_logits = grouped(input_ids=IDS).logits
        with adapters_disabled(grouped):
            assert torch.allclose(grouped(input_ids=IDS).logits, base(input_ids=IDS).logits, atol=1e-6)
        merged = copy.deepcopy(grouped).merge_and_unload()
        assert torch.allclose(merged(input_ids=IDS).logits, adapted_logits, atol=1e-5)
    assert not torch.allclose(adapted_logits, base(input_ids=IDS).logits, atol=1e-3)


def test_a_copy_of_the_model_computes_with_its_own_adapters(both):
    grouped, _ = both("qwen3_moe")
    twin = copy.deepcopy(grouped)
    with torch.no_grad():
        before = grouped(input_ids=IDS).logits
        for name, parameter in twin.named_parameters():
            if ".experts." in name and ".lora_B." in name:
                parameter.zero_()
        assert torch.equal(grouped(input_ids=IDS).logits, before)
        assert not torch.allclose(twin(input_ids=IDS).logits, before, atol=1e-4)


def test_experts_that_are_not_grouped_and_routers_remain_peft_s(adapted):
    eager = adapted(plain_model("mixtral", experts_implementation="eager"), LORA)
    assert wrappers_of(eager, ParamWrapper) and not wrappers_of(eager, GroupedExperts)
    routed = adapted(plain_model("mixtral"), LoraSection(rank=2, experts=False, router=True))
    assert wrappers_of(routed, ParamWrapper) and group_expert_adapters(routed) == 0


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_experts_multiply_in_the_dtype_of_autocast_as_fsdp2_does(model_type):
    """float32 masters under autocast give the numbers of bfloat16 weights, which FSDP2 gathers: in both passes."""
    model = plain_model(model_type)
    (name, _), *_ = ((name, each) for name, each in model.named_modules() if name.endswith(".experts"))
    halves = copy.deepcopy(model).bfloat16()
    hidden = torch.randn(20, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    choice = torch.rand(20, 4, generator=torch.Generator().manual_seed(2)).topk(2)
    results = []
    for each in (model, halves):
        experts, inputs = each.get_submodule(name), hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=each is model), Products() as products:
            output = experts(inputs, choice.indices, choice.values.bfloat16())
        output.float().square().sum().backward()
        assert products.dtypes == [torch.bfloat16] * 2
        results.append((output, inputs.grad, *(one.grad.bfloat16() for one in experts.parameters() if one.ndim == 3)))
    assert len(results[0]) == 4
    assert all(map(torch.equal, *results))


class Products(TorchDispatchMode):
    """The dtypes of the matrices of grouped products."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.name() == "aten::_grouped_mm":
            self.dtypes.append(arguments[1].dtype)
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize(
    ("device", "capability", "precision", "missing"),
    [
        ("cpu", None, "fp32", None),
        ("cuda", (9, 0), "bf16", None),
        ("cuda", (10, 0), "fp8", None),
        ("cuda", (8, 0), "bf16", "sm_80"),
        ("cuda", (12, 0), "bf16", "sm_120"),
        ("cuda", (9, 0), "fp32", "train.precision is fp32"),
    ],
)
def test_a_gpu_without_a_kernel_for_all_experts_is_named(monkeypatch, device, capability, precision, missing):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    found = missing_grouped_kernel(torch.device(device), precision=precision)
    assert found is None if missing is None else missing in found
