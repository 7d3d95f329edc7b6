"""LoRA in one pass computes what peft computes, with one mask and one copy of the inputs for layers that share them."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners import lora
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.config.sections.model import LoraSection, QuantizationSection
from finetune.memory.tracer import LiveBytes
from finetune.model.activations import enable_gradient_checkpointing
from finetune.model.adapters.products import MultiplyA
from finetune.model.adapters.single_pass import SinglePassLayer, use_single_pass
from finetune.model.kernels import compilation
from finetune.model.upstream import adapters_disabled
from tests.live_bytes import saved_bytes

BATCH = torch.arange(96).view(4, 24)
DROPOUT = LoraSection(rank=4, alpha=8, dropout=0.2)
SECTIONS = {
    "plain": LoraSection(rank=4, alpha=8),
    "rslora": LoraSection(rank=4, alpha=8, rslora=True),
    "own ranks and scales": LoraSection(rank=4, alpha=8, rank_pattern={"q_proj": 3}, alpha_pattern={"up_proj": 3.0}),
    "two of three": LoraSection(rank=4, target_modules=("q_proj", "v_proj")),
}


class Attention(nn.Module):
    """Four projections, some of which read a second tensor if there is one."""

    def __init__(self, base_bias: bool = False) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(6, 5 if name == "k_proj" else 6, bias=base_bias))

    def forward(self, states: Tensor, others: Tensor | None = None) -> tuple[Tensor, ...]:
        read = states if others is None else others
        return self.q_proj(states), self.k_proj(read), self.v_proj(read), self.o_proj(states + 1)


@pytest.fixture
def attention() -> Any:
    """Return a function that builds the module with adapters in float64."""

    def make(*, bias: bool = False, **settings: Any) -> Any:
        torch.manual_seed(1)
        config = LoraConfig(r=2, lora_alpha=6, target_modules=[f"{name}_proj" for name in "qkvo"], **settings)
        module = inject_adapter_in_model(config, Attention(bias)).double()
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        return module.train()

    return make


def step(model: Any, *, seed: int = 3, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients by name of one batch."""
    model.zero_grad()
    torch.manual_seed(seed)
    batch = BATCH.to(model.device)
    with torch.autocast(batch.device.type, dtype=torch.bfloat16, enabled=autocast):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss_of(model: Any) -> Tensor:
    return model(input_ids=BATCH, labels=BATCH, use_cache=False).loss


def require_same(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Require the same loss and gradients, as `step` returns them, but for rounding."""
    assert float(one[0]) == pytest.approx(float(other[0]), abs=1e-6)
    assert largest_difference(one[1], other[1]) < 1e-5


def largest_difference(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    assert some.keys() == others.keys() and len(some) >= 4
    return max(float((some[name] - others[name]).abs().max() / others[name].abs().max()) for name in some)


def single_pass_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, SinglePassLayer)]


def test_masks_of_the_parts_of_an_input_are_those_of_the_whole_one():
    """Also what is drawn next is the same."""
    rows, factor = torch.randn(7, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)

    def multiply(part: int, num_parts: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        own = slice(part * 6 // num_parts, (part + 1) * 6 // num_parts)
        (product,) = MultiplyA.apply(rows[:, own], 1.7, 0.4, (part, num_parts), None, None, factor[:, own])
        return product, torch.rand(1)

    whole, drawn = multiply(0, 1)
    parts = [multiply(part, 3) for part in range(3)]
    torch.testing.assert_close(sum(product for product, _ in parts), whole)
    assert all(other == drawn for _, other in parts)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 6), (3, 6)])  # 48 elements pack into whole bytes, 18 do not
def test_queries_keys_and_values_share_a_mask_and_others_have_their_own(attention, bias, shape):
    module = attention(bias=bias, lora_dropout=0.3)
    use_single_pass(module, in_place=True)
    states = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(5)
    outputs = module(states)
    torch.manual_seed(5)
    rows = states.numel() // 6
    masks = [torch.empty(rows, 6, dtype=torch.bool).bernoulli_(0.7).view(shape) for _ in range(2)]
    expected = []
    for name, mask in zip(("q_proj", "k_proj", "v_proj", "o_proj"), (masks[0], *masks[:1] * 2, masks[1]), strict=True):
        layer = getattr(module, name)
        read = states + 1 if name == "o_proj" else states
        product = read * mask / 0.7 @ layer.lora_A["default"].weight.T @ layer.lora_B["default"].weight.T
        expected.append(layer.base_layer(read) + 3 * product)
    weights = [p for p in module.parameters() if p.requires_grad]
    found, wanted = (
        torch.autograd.grad(sum(output.square().sum() for output in some), [states, *weights])
        for some in (outputs, expected)
    )
    for one, other in zip((*outputs, *found), (*expected, *wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-10)


def test_cross_attention_shares_only_what_reads_the_same_tensor(attention):
    module = attention(lora_dropout=0.3)
    use_single_pass(module, in_place=True)
    states, others = torch.randn(2, 2, 3, 6, dtype=torch.float64)
    torch.manual_seed(5)
    module(states, others)
    outputs = module(states, others)
    assert outputs[0].shape == (2, 3, 6)
    torch.manual_seed(5)
    first = module(states, others)
    second = module(states, others)
    assert all(torch.equal(one, other) for one, other in zip(second, outputs, strict=True))
    assert not torch.equal(first[0], second[0])
    assert module.q_proj.common_input is module.v_proj.common_input is not module.o_proj.common_input
    assert module.q_proj.common_input._inputs is None and module.q_proj.common_input._hidden == {}


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("name", ["llama untied", "qwen3 tied", "gpt2 tied"])
def test_a_model_has_the_loss_and_gradients_it_has_with_peft(from_config, build, adapted, name, section):
    if name == "gpt2 tied" and section in ("own ranks and scales", "two of three"):
        pytest.skip("these names are not in the model")
    plain = adapted(build(from_config(name)), SECTIONS[section], noise=0.1).train()
    model = copy.deepcopy(plain)
    names = [name for name, _ in model.named_parameters()]
    use_single_pass(model, in_place=True)
    layers = [name for name, module in plain.named_modules() if isinstance(module, lora.LoraLayer)]
    assert single_pass_layers(model) == layers and len(layers) >= 4
    assert [name for name, _ in model.named_parameters()] == names
    require_same(step(model), step(plain))


def test_a_copy_of_a_model_uses_its_own_weights(from_config, build, adapted):
    model = adapted(build(from_config()), DROPOUT, noise=0.1).train()
    use_single_pass(model, in_place=True)
    before, own = step(model)
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loss, gradients = step(clone)
    assert torch.equal(loss, before) and largest_difference(gradients, own) == 0


def test_disabled_merged_and_several_adapters_run_as_in_peft(from_config, build, adapted):
    plain = adapted(build(from_config()), DROPOUT, noise=0.1).eval()
    model = copy.deepcopy(plain)
    use_single_pass(model, in_place=True)
    found, expected = [], []
    for results, own in ((found, model), (expected, plain)):
        with torch.no_grad(), adapters_disabled(own):
            results.append(own(input_ids=BATCH).logits)
        own.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        own.base_model.set_adapter(["default", "second"])
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            for name, parameter in own.named_parameters():
                if ".second." in name:
                    parameter.normal_()
        with torch.no_grad():
            results.append(own(input_ids=BATCH).logits)
            own.base_model.set_adapter("default")
            own.base_model.merge_adapter()
            results.append(own(input_ids=BATCH).logits)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_dora_and_experts_keep_the_forward_pass_of_peft(from_config, build, adapted):
    model = adapted(build(from_config()), LoraSection(rank=2, dora=True))
    use_single_pass(model, in_place=True)
    assert single_pass_layers(model) == []


def test_dropout_keeps_no_copy_of_the_inputs_and_one_bit_of_mask_per_element(from_config, build, adapted):
    sizes = {}
    for section in (SECTIONS["plain"], DROPOUT):
        plain = adapted(build(from_config()), section, noise=0.1).train()
        model = copy.deepcopy(plain)
        use_single_pass(model, in_place=True)
        sizes[section.dropout] = saved_bytes(model, loss_of), saved_bytes(plain, loss_of)
    rows, inputs = BATCH.numel(), 2 * (3 * 32 + 64)  # of two layers: q/k/v, o, gate/up; down
    assert sizes[0.0][0] == sizes[0.0][1]
    assert sizes[0.2][0] == sizes[0.0][0] + rows * inputs // 8
    assert sizes[0.2][1] > 1.4 * sizes[0.2][0]


def test_frozen_weights_keep_no_casts_for_the_backward_pass(from_config, build, adapted):
    """With peft's layers, autocast's casts of frozen float32 weights are kept until each layer's backward pass."""
    plain = adapted(build(from_config(dtype="float32")), SECTIONS["plain"], noise=0.1).train()
    model = copy.deepcopy(plain)
    use_single_pass(model, in_place=True)
    with torch.autocast("cpu", torch.bfloat16):
        kept = [saved_bytes(each, loss_of) for each in (plain, model)]
    frozen = [module.base_layer.weight for module in model.modules() if isinstance(module, SinglePassLayer)]
    assert len(frozen) == 14 and kept[0] - kept[1] >= 2 * sum(weight.numel() for weight in frozen)


@pytest.mark.parametrize("mode", [True, "selective"])
def test_recomputation_changes_no_number(from_config, build, adapted, mode):
    model = adapted(build(from_config()), DROPOUT, noise=0.1).train()
    use_single_pass(model, in_place=mode != "selective")
    expected = step(model)
    enable_gradient_checkpointing(model.get_base_model(), mode)
    require_same(step(model), expected)


@pytest.mark.parametrize(
    "checkpointing", [*(pytest.param(each, marks=pytest.mark.full) for each in (False, True)), "selective"]
)
def test_layers_compile_into_as_many_graphs_as_with_peft(from_config, build, adapted, monkeypatch, checkpointing):
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    plain = adapted(build(from_config()), SECTIONS["plain"], noise=0.1).train()
    expected = step(plain)
    num_graphs = []
    for is_single_pass in (False, True):
        model = copy.deepcopy(plain)
        if is_single_pass:
            use_single_pass(model, in_place=checkpointing != "selective")
        if checkpointing:
            enable_gradient_checkpointing(model.get_base_model(), checkpointing)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        lines: list[str] = []
        compilation.compile_model(model.get_base_model(), "regional", log=lines.append)
        require_same(step(model), expected)
        assert not [line for line in lines if line.startswith("warning")]
        assert not torch._dynamo.utils.counters["graph_break"]
        num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert num_graphs[0] == num_graphs[1] >= 1


@pytest.mark.parametrize("autocast", [False, True])
def test_selective_checkpointing_saves_one_output_per_layer(from_config, build, adapted, autocast):
    """The sum of a base's product and its adapter's, by one operator; peft's forward pass saves the base's, too."""
    sizes, results = [], []
    for is_single_pass in (True, False):
        model = adapted(build(from_config()), SECTIONS["plain"], noise=0.1).train()
        if is_single_pass:
            use_single_pass(model, in_place=False)
        enable_gradient_checkpointing(model.get_base_model(), "selective")
        results.append(step(model, autocast=autocast))
        with LiveBytes() as live, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            hidden = model.get_base_model().model(input_ids=BATCH, use_cache=False).last_hidden_state
        assert hidden.requires_grad
        sizes.append(live.now)
    widths = 32 + 16 + 16 + 32 + 64 + 64 + 32  # of queries, keys, values, their output, gate, up and down
    outputs = 2 * BATCH.numel() * widths * (2 if autocast else 4)  # of two layers
    casts = 2 * sum(p.numel() for p in model.parameters() if p.requires_grad) if autocast else 0  # for recomputation
    assert sizes[1] - sizes[0] >= outputs - casts
    (loss, gradients), (expected, others) = results
    assert float(loss) == pytest.approx(float(expected), abs=1e-2 if autocast else 1e-6)
    assert largest_difference(gradients, others) < (0.1 if autocast else 1e-5)
    with Calls() as backward:
        model = adapted(build(from_config()), SECTIONS["plain"], noise=0.1).train()
        use_single_pass(model, in_place=False)
        enable_gradient_checkpointing(model.get_base_model(), "selective")
        loss = loss_of(model)
        forward = backward.counts["finetune::linear_plus_product"]
        loss.backward()
    assert backward.counts["finetune::linear_plus_product"] == forward == 14


@pytest.fixture
def quantized(from_config, build, adapted, tmp_path) -> Any:
    """Return a function that loads the model with a quantized base."""
    pytest.importorskip("bitsandbytes")

    def load(keys: dict[str, Any]) -> Any:
        build(from_config()).save_pretrained(tmp_path)
        section = QuantizationSection(compute_dtype="float32").model_copy(update=keys)
        values = {"from_config": None, "name": str(tmp_path), "quantization": section}
        return adapted(build(from_config().model_copy(update=values)), SECTIONS["plain"], noise=0.1).train()

    return load


class Calls(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.counts[function.name()] += 1
        return function(*arguments, **(keywords or {}))


def calls(model: Any) -> tuple[Counter[str], Counter[str]]:
    """Return how often the forward and the backward pass call each operator."""
    with Calls() as forward:
        loss = loss_of(model)
    with Calls() as backward:
        loss.backward()
    return forward.counts, backward.counts


def only_casts_of_factors(counts: Counter[str]) -> Counter[str]:
    return Counter({name: number for name, number in counts.items() if name == "aten::_foreach_copy_"})


@pytest.mark.parametrize("keys", [{"kind": "nf4"}, {"bits": 8}])
def test_a_quantized_base_has_the_loss_and_gradients_it_has_with_peft(quantized, keys):
    """The product with `B` is added in place, and selective checkpointing saves the quantized products."""
    plain = quantized(keys)
    expected, others = step(plain)
    for is_selective in (False, True):
        model = quantized(keys)
        use_single_pass(model, in_place=not is_selective)
        assert len(single_pass_layers(model)) == 14
        if is_selective:
            enable_gradient_checkpointing(model.get_base_model(), "selective")
        loss, gradients = step(model)
        assert float(loss) == pytest.approx(float(expected), abs=1e-6)
        assert largest_difference(gradients, others) < 1e-4
        forward, backward = calls(model)
        assert forward["aten::addmm_"] == (0 if is_selective else 14)
        assert forward["bitsandbytes::gemm_4bit"] == (0 if "bits" in keys else 14)  # on CPUs 8 bits have no operator
        assert backward["bitsandbytes::gemm_4bit"] == 0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_factors_are_cast_by_one_operation_in_each_pass(from_config, build, adapted, checkpointing):
    """Also where recomputation needs them again; after an update the next pass, or a layer alone, has new ones."""
    model = adapted(build(from_config(dtype="bfloat16")), SECTIONS["plain"], noise=0.1).train()
    use_single_pass(model, in_place=True)
    if checkpointing:
        enable_gradient_checkpointing(model.get_base_model(), True)
    factors = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(factors) == 28 and {factor.dtype for factor in factors} == {torch.float32}
    layer = model.get_base_model().model.layers[0].mlp.down_proj
    with torch.autocast("cpu", torch.bfloat16):
        counts = [sum(each.values()) for each in map(only_casts_of_factors, calls(model))]
        assert counts == [1, 0]
        rows = torch.randn(3, 64, dtype=torch.bfloat16)
        before = layer(rows)
        with torch.no_grad():
            layer.lora_B["default"].weight.add_(1.0)
        assert not torch.equal(layer(rows), before)
        before = model(input_ids=BATCH).logits
        for factor in factors:
            factor.data.mul_(2.0)  # as DeepSpeed does, which counts no version
        assert not torch.equal(model(input_ids=BATCH).logits, before)


def test_without_autocast_products_have_the_dtype_of_half_precision_inputs(from_config, build, adapted):
    """Under ZeRO in bf16, where factors are float32 and there is no autocast, as under other strategies."""
    results = []
    for autocast in (False, True):
        model = adapted(build(from_config(dtype="bfloat16")), SECTIONS["plain"], noise=0.1).train()
        use_single_pass(model, in_place=True)
        with Calls() as seen, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model.get_base_model().model(input_ids=BATCH)
        results.append(step(model, autocast=autocast))
        assert seen.counts["aten::_foreach_copy_"] == 1
    (loss, gradients), (expected, others) = results
    assert float(loss) == pytest.approx(float(expected), abs=1e-2)
    assert largest_difference(gradients, others) < 0.1
