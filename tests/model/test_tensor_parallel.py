"""Which models tensor parallelism splits, which weights of them, and what transformers does wrong with a norm."""

import os

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    Glm4Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from finetune.checkpoint.sharding.access import state_layout
from finetune.checkpoint.sharding.state_layout import ShardRange
from finetune.errors import StrategyError
from finetune.model.adapters.single_pass import use_single_pass
from finetune.model.size import measure_model
from finetune.model.tensor_parallel import (
    _split_vocabulary,
    partial_gradient_parameters,
    split_layers,
    splitting_problem,
)
from finetune.runtime.parallel import TensorGroup
from finetune.runtime.processes import free_loopback_port
from tests.refusals import refused
from tests.small_models import TINY

SIZES = {**TINY, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32}


@pytest.fixture
def group():
    """Return a group of this process alone."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_loopback_port()), "RANK": "0", "WORLD_SIZE": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in address.items():
            patch.setitem(os.environ, name, value)
        dist.init_process_group("gloo")
        yield TensorGroup(mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)))
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("config", "size", "problem"),
    [
        (LlamaConfig(**SIZES), 2, None),
        (Qwen3Config(**SIZES), 2, None),
        (LlamaConfig(**SIZES), 4, "num_key_value_heads is 2, which 4 ranks cannot share evenly"),
        (LlamaConfig(**{**SIZES, "intermediate_size": 33}), 2, "intermediate_size is 33, which 2 ranks"),
        (LlamaConfig(**SIZES, attention_bias=True), 2, "`attention_bias`"),
        (LlamaConfig(**SIZES, mlp_bias=True), 2, "`mlp_bias`"),
        (LlamaConfig(**SIZES, attention_dropout=0.1), 2, "`model.config: {attention_dropout: 0.0}` turns it off"),
        (Glm4Config(**SIZES, attention_bias=True), 2, None),
        (Qwen3MoeConfig(**SIZES, moe_intermediate_size=15), 2, "moe_intermediate_size is 15"),
        (GPT2Config(), 2, "`gpt2` was not compared with one process"),
    ],
)
def test_configs_that_ranks_cannot_split_are_refused_by_name(config, size, problem):
    found = splitting_problem(config, size)
    assert found is None if problem is None else problem in found


def test_matrices_and_vocabulary_are_split_and_norms_are_whole(group):
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES))
    assert split_layers(model, group) == "1 ranks share the matrices of every layer, and embedding and head"
    placements = {name: str(p.placements[0]) for name, p in model.named_parameters() if isinstance(p, DTensor)}
    by_columns = {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
    by_rows = {f"self_attn.{n}_proj.weight" for n in "qkv"} | {"mlp.gate_proj.weight", "mlp.up_proj.weight"}
    layers = dict.fromkeys(by_rows, "S(0)") | dict.fromkeys(by_columns, "S(1)")
    vocabulary = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), "S(0)")
    assert placements == {f"model.layers.0.{name}": placement for name, placement in layers.items()} | vocabulary
    whole = sum(p.numel() for p in model.parameters() if not isinstance(p, DTensor))
    assert measure_model(model).whole_share == whole / sum(p.numel() for p in model.parameters())
    layout = state_layout(model)
    assert layout.shards["model.layers.0.mlp.down_proj.weight"].range == ShardRange(0, 16, 32, 0, 32)
    assert layout.shards["model.norm.weight"].is_replicated
    assert not layout.shards["model.layers.0.mlp.up_proj.weight"].is_replicated


def test_a_vocabulary_that_the_ranks_cannot_share_stays_whole_and_tied_weights_stay_tied(group, monkeypatch):
    tied = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=True))
    split_layers(tied, group)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert isinstance(tied.lm_head.weight, DTensor)
    odd = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "vocab_size": 33}))
    monkeypatch.setattr(DeviceMesh, "size", lambda *_: 2)
    assert _split_vocabulary(odd, group.mesh) == "2 ranks cannot share 33 tokens evenly"
    assert not any(isinstance(parameter, DTensor) for parameter in odd.parameters())


def test_experts_and_packed_layers_are_split_within_each_of_their_matrices(group):
    model = AutoModelForCausalLM.from_config(
        MixtralConfig(**{**SIZES, "num_hidden_layers": 1}, num_local_experts=4, pad_token_id=None)
    )
    split_layers(model, group)
    shards = state_layout(model).shards
    experts = "model.layers.0.mlp.experts"
    assert shards[f"{experts}.gate_up_proj"].range == ShardRange(0, 8, 32 * 16, 0, 32 * 16)  # 4 gates, 4 ups
    assert shards[f"{experts}.down_proj"].range == ShardRange(0, 4 * 16, 32, 0, 32)
    assert shards["model.layers.0.mlp.gate.weight"].is_replicated


@pytest.fixture
def one_of_two():
    """Return a group of two ranks, of which this process is one and the other's tensors are never sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield TensorGroup(size=2, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    dist.destroy_process_group()


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), Glm4Config(**SIZES, head_dim=8, pad_token_id=0)])
@pytest.mark.parametrize(("has_adapters", "forward", "both"), [(False, 2, 4), (True, 4, 6)])
def test_a_layer_sums_twice_forward_and_twice_backward(one_of_two, config, has_adapters, forward, both):
    """By `ColwiseParallel` it is 7 times: queries, keys, values, gate and up sum a gradient of their inputs each.

    Adapters add the product with `A` of the two layers whose inputs are split; the gradients of the other `A` are
    summed at the end of a step.
    """
    model = AutoModelForCausalLM.from_config(config)
    if has_adapters:
        wrapped = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
        use_single_pass(wrapped, in_place=True)
    split_layers(model, one_of_two)
    layer, hidden = model.model.layers[0], torch.randn(1, 8, config.hidden_size, requires_grad=True)
    positions = torch.arange(8)[None]
    with CommDebugMode() as counts:
        output = layer(hidden, position_embeddings=model.model.rotary_emb(hidden, positions), position_ids=positions)
        assert counts.get_total_counts() == forward
        output.sum().backward()
    assert counts.get_total_counts() == both
    partial = {id(parameter) for parameter in partial_gradient_parameters(layer)}
    names = {name.rpartition(".lora_A")[0] for name, one in layer.named_parameters() if id(one) in partial}
    layers = {name for name, _ in layer.named_modules() if name.endswith(("q_proj", "k_proj", "v_proj", "up_proj"))}
    layers |= {"mlp.gate_proj"} & dict(layer.named_modules()).keys()
    assert len(layers) in (4, 5) and names == (layers if has_adapters else set())


def test_dora_is_refused_on_a_layer_whose_features_are_gathered(group):
    whole = AutoModelForCausalLM.from_config(Phi3Config(**SIZES, pad_token_id=0))
    model = get_peft_model(whole, LoraConfig(r=2, use_dora=True, target_modules=["qkv_proj"]))
    with refused(StrategyError, "`model.layers.0.self_attn.qkv_proj`"):
        split_layers(model.get_base_model(), group)


def test_transformers_sums_the_gradient_of_a_head_norm_again_for_every_microbatch(group, monkeypatch):
    """The sum of two ranks doubles: here by a patched all-reduce. Ours is summed once, at the end of the step."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: tensor.mul_(2))

    def gradient(split):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES))
        split(model)
        for _ in range(2):
            ids = torch.arange(8)[None]
            model(input_ids=ids, labels=ids).loss.backward()
        return model.model.layers[0].self_attn.q_norm.weight.grad

    norm = {"model.layers.0.self_attn.q_norm": "replicated_with_grad_allreduce"}
    alone = gradient(lambda model: None)
    ours = gradient(lambda model: split_layers(model, group))
    theirs = gradient(lambda model: apply_tensor_parallelism(model, group.mesh, norm))
    torch.testing.assert_close(ours, alone)
    torch.testing.assert_close(theirs, 3 * alone)  # once it is 2: `partial_gradient_parameters` may go
