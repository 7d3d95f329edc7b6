"""LoRA's targets in mixtures of experts and models with mixers are selected, described and checked early."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from finetune.config.sections.model import FromConfigSection, LoraSection, ModelSection
from finetune.errors import ModelError
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from finetune.model.adapters.lora import adapter_summary
from finetune.model.adapters.targets import rewritten_names, target_problems
from finetune.model.loading.dry_run import meta_model
from tests.model.moe_models import HYBRID_MODELS, MOE_MODELS
from tests.refusals import refused

MODELS = {**MOE_MODELS, **HYBRID_MODELS}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
LINEAR_ATTENTION = {"in_proj_qkvz", "in_proj_ba", "out_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
LATENT_ATTENTION = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
EXPERTS = {"experts", "base_layer"}

ADAPTED = {
    "qwen3_moe": ATTENTION | EXPERTS,
    "qwen3_5_moe_text": {
        *(ATTENTION | EXPERTS | MLP),
        *("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "shared_expert_gate"),
    },
    "qwen3_next": ATTENTION | EXPERTS | MLP | LINEAR_ATTENTION | {"shared_expert_gate"},
    "mixtral": ATTENTION | EXPERTS,
    "gpt_oss": ATTENTION | EXPERTS,
    "deepseek_v3": LATENT_ATTENTION | EXPERTS | MLP,
    "glm4_moe": ATTENTION | EXPERTS | MLP,
    "olmoe": ATTENTION | EXPERTS,
    "granitemoe": ATTENTION | EXPERTS,
    "lfm2_moe": {"q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"} | EXPERTS,
    "granitemoehybrid": ATTENTION | EXPERTS | {"in_proj", "input_linear", "output_linear"},
    "falcon_h1": ATTENTION | MLP | {"in_proj"},
    "mamba2": {"in_proj"},
}
"""The modules that `all-linear` adapts, by the last part of their names; nested adapters have the name `base_layer`."""


def section_of(model_type: str, **keys) -> ModelSection:
    return ModelSection(from_config=FromConfigSection(model_type=model_type, values=MODELS[model_type]), **keys)


def adapted_names(model: nn.Module) -> set[str]:
    return {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if ".lora_A." in name}


@pytest.fixture
def adapt(build):
    def make(model_type: str, *, recorded=(), **keys):
        context = AdapterContext(seed=1, recorded=recorded)
        return add_adapter(build(section_of(model_type)), LoraSection(**{"rank": 2, **keys}), context)

    return make


@pytest.mark.parametrize("model_type", MODELS)
def test_all_linear_adapts_routed_experts_and_leaves_the_router_alone(adapt, model_type):
    model = adapt(model_type)
    assert adapted_names(model) == ADAPTED[model_type]
    summary = adapter_summary(model)
    if model_type in HYBRID_MODELS:
        assert "out_proj (a kernel reads its weight)" in summary
    if model_type in MOE_MODELS:
        assert "4 routed experts (" in summary
        assert summary.endswith("not on router (`model.lora.router: true` adapts it)")
        for name, parameter in model.named_parameters():
            if ".lora_A." in name and ".experts." in name:
                assert parameter.shape[0] == 2 * 4, name  # the rank as it was written, for each of four experts


def test_experts_router_names_and_layers_select_the_adapted_modules(adapt):
    assert adapted_names(adapt("deepseek_v3", experts=False)) == ADAPTED["deepseek_v3"] - EXPERTS
    assert adapted_names(adapt("mixtral", router=True)) == ATTENTION | EXPERTS | {"gate"}
    assert adapted_names(adapt("mixtral", target_modules=("q_proj",))) == {"q_proj"}
    assert adapted_names(adapt("mixtral", target_modules=("q_proj",), experts=True)) == {"q_proj"} | EXPERTS
    names = [name for name, _ in adapt("mixtral", layers=(1,), router=True).named_parameters() if ".lora_" in name]
    assert len(names) == 2 * 7 and all(".layers.1." in name for name in names)


def test_dropout_is_that_of_modules_and_patterns_reach_parameters(adapt):
    patterns = {"rank_pattern": {"gate_up_proj": 3, "q_proj": 1}, "alpha_pattern": {r"experts\.down_proj": 5.0}}
    model = adapt("mixtral", dropout=0.25, **patterns)
    layer = model.get_submodule("base_model.model.model.layers.0")
    assert layer.self_attn.q_proj.lora_dropout["default"].p == 0.25
    assert isinstance(layer.mlp.experts.lora_dropout["default"], nn.Identity)
    assert "(down_proj, gate_up_proj, without dropout)" in adapter_summary(model)
    assert (layer.self_attn.q_proj.r["default"], layer.mlp.experts.base_layer.r["default"]) == (1, 3)
    assert layer.mlp.experts.scaling["default"] == 2.5
    batch = torch.arange(24).reshape(2, 12)
    torch.nn.init.ones_(layer.self_attn.q_proj.lora_B["default"].weight)
    assert not torch.equal(model.train()(input_ids=batch).logits, model(input_ids=batch).logits)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_checkpoint_of_an_older_version_keeps_the_targets_that_peft_had_chosen(adapt, model_type):
    """Older versions adapted the router, not shared experts, and doubled gate_up_proj's rank; in gpt_oss nothing."""
    prefix, mlp = "base_model.model.model.layers.1", "mlp.gate.lora_A.default.weight"
    older = {"gpt_oss": [f"{prefix}.self_attn.q_proj.lora_A.default.weight"]}.get(model_type, [f"{prefix}.{mlp}"])
    model = adapt(model_type, recorded=older)
    if model_type == "gpt_oss":
        assert adapted_names(model) == ATTENTION
        return
    assert adapted_names(model) == (ADAPTED[model_type] | {"gate"}) - MLP
    assert model.get_submodule(f"{prefix}.mlp.experts.base_layer").r["default"] == 4
    assert model.get_submodule(f"{prefix}.mlp.experts").r["default"] == 2


@pytest.mark.parametrize("model_type", ["deepseek_v3", "mixtral", "lfm2_moe"])
def test_a_checkpoint_of_this_version_keeps_its_targets(adapt, model_type):
    first = {name for name, parameter in adapt(model_type).named_parameters() if parameter.requires_grad}
    again = adapt(model_type, recorded=first)
    assert {name for name, parameter in again.named_parameters() if parameter.requires_grad} == first
    assert adapter_summary(again) is not None


REFUSED = [
    ("mixtral", {"dora": True}, "model.lora.dora"),
    ("gpt_oss", {"init": "pissa"}, "model.lora.init"),
    ("qwen3_moe", {"init": "olora"}, "model.lora.init"),
    ("olmoe", {"experts": False, "router": True, "dora": True}, "model.lora.dora"),
    ("mamba2", {"experts": False}, "model.lora.experts"),
    ("mamba2", {"router": True}, "model.lora.router"),
]


@pytest.mark.parametrize(("model_type", "keys", "key"), REFUSED)
def test_unsupported_adapter_settings_of_experts_are_found_without_weights(adapt, model_type, keys, key):
    model = meta_model(section_of(model_type), head="causal_lm")
    assert next(model.parameters()).is_meta
    (problem,) = target_problems(model, LoraSection(**keys))
    assert problem.key == key
    with refused(ModelError, key):
        adapt(model_type, **keys)


def test_names_of_expert_matrices_are_hinted_at(adapt):
    with refused(ModelError, "`gate_proj`", "`model.lora.experts: true`"):
        adapt("qwen3_moe", target_modules=("q_proj", "gate_proj"))


JETMOE = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_key_value_heads": 2}
JETMOE |= {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}


def test_experts_next_to_their_router_are_adapted_and_the_router_is_not(build):
    section = ModelSection(from_config=FromConfigSection(model_type="jetmoe", values=JETMOE))
    model = add_adapter(build(section), LoraSection(rank=2), AdapterContext(seed=1))
    names = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A." in name}
    ends = {"mlp.input_linear", "mlp.output_linear", "experts.input_linear", "experts.output_linear", "kv_proj"}
    assert {".".join(name.split(".")[-2:]).removeprefix("self_attention.") for name in names} == ends
    assert "4 routed experts (input_linear.weight, output_linear.weight)" in adapter_summary(model)
    bare = add_adapter(build(section), LoraSection(rank=2, experts=False), AdapterContext(seed=1))
    assert adapted_names(bare) == {"kv_proj"}


def test_peft_still_rewrites_targets_and_overlooks_mixers(build):
    """Fails when the workarounds in finetune/model/adapters/targets.py are no longer needed."""
    model = get_peft_model(build(section_of("deepseek_v3")), LoraConfig(r=2, target_modules="all-linear"))
    assert adapted_names(model) == (LATENT_ATTENTION | EXPERTS | {"gate"}), "keep_targets can go"
    assert rewritten_names("deepseek_v3") == {"gate", "gate_proj", "up_proj", "down_proj"}
    assert rewritten_names("llama") == rewritten_names("gpt_oss") == frozenset()
    hybrid = get_peft_model(build(section_of("granitemoehybrid")), LoraConfig(r=2, target_modules="all-linear"))
    assert "out_proj" in adapted_names(hybrid), "peft refuses what is_read_by_kernel finds"
    with pytest.raises(ValueError, match="incompatible with Mamba"):
        get_peft_model(build(section_of("mamba2")), LoraConfig(r=2, target_modules=["out_proj"]))
