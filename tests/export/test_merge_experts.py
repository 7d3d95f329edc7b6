"""Adapters of routed experts: plain peft loads what was exported, and a merged model has the adapter's logits."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finetune.config.sections.model import FromConfigSection, LoraSection, ModelSection
from finetune.export.merge import merge
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from tests.export.conftest import load_from, values_of
from tests.model.moe_models import HYBRID_MODELS, MOE_MODELS

pytestmark = [pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")]

LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
MODELS = {**MOE_MODELS, **HYBRID_MODELS, "llama": LLAMA}
ALL = {"rank": 4, "dropout": 0.05}
VARIANTS = [
    ("deepseek_v3", {**ALL, "router": True}),
    ("gpt_oss", {**ALL, "router": True, "rslora": True}),
    ("qwen3_next", {**ALL, "rank_pattern": {"down_proj": 2, "gate_up_proj": 8}, "alpha_pattern": {"up_proj": 5.0}}),
    ("deepseek_v3", {**ALL, "layers": (1,), "init": "gaussian"}),
    ("deepseek_v3", {**ALL, "target_modules": ("o_proj", "down_proj")}),
    ("mixtral", {**ALL, "target_modules": ("o_proj",), "experts": True}),
    ("olmoe", {"rank": 4, "experts": False, "dora": True}),
    ("glm4_moe", {"rank": 4, "experts": False, "init": "pissa"}),
]


def adapted(model_type, *, dtype="float32", **keys):
    """Return a model whose adapters all do something, as after training."""
    section = ModelSection(from_config=FromConfigSection(model_type=model_type, values=MODELS[model_type]), dtype=dtype)
    model = add_adapter(load_from(section), LoraSection(**keys), AdapterContext(seed=1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.rand(buffer.shape, generator=generator))
    return model.eval()


def all_values_of(model):
    return values_of(model) | {name: each.detach().clone() for name, each in model.state_dict().items()}


def logits_of(model, batch):
    with torch.no_grad():
        return model.eval()(input_ids=batch).logits


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [*((model_type, ALL) for model_type in MODELS), *VARIANTS],
    ids=[*MODELS, *(f"{model_type} {' '.join(list(keys)[1:])}" for model_type, keys in VARIANTS)],
)
def test_plain_peft_and_the_merge_give_the_adapter_s_logits(model_type, keys, export, batch, tmp_path):
    model = adapted(model_type, **keys)
    expected = logits_of(model, batch)
    with model.disable_adapter():
        assert (logits_of(model, batch) - expected).abs().max() > 0.05
    values = all_values_of(model)
    final = export(model, values).folder
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(final / "base"), final)
    assert torch.allclose(logits_of(loaded, batch), expected, atol=1e-5)
    assert {name for name, _ in loaded.named_parameters() if "lora_A" in name} == {
        name for name, _ in model.named_parameters() if "lora_A" in name
    }
    again = merge(loaded, all_values_of(loaded), dtype=None).weights
    final.rename(tmp_path / "adapter")
    merged = export(model, values, merge=True).folder
    plain, loading = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not any(loading[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.allclose(logits_of(plain, batch), expected, atol=1e-5)
    for name, value in plain.state_dict().items():
        assert torch.allclose(again[name], value, atol=1e-6), name


def test_both_matrices_of_an_expert_are_merged_and_no_other_s(batch):
    model = adapted("mixtral", rank=4)
    name = "base_model.model.model.layers.1.mlp.experts"
    values = all_values_of(model)
    before = {each: values[f"{name}.base_layer.base_layer.{each}"] for each in ("gate_up_proj", "down_proj")}
    rank = slice(4, 8)  # of expert 1: the rows of A belong to the experts in turn
    for wrapper in (name, f"{name}.base_layer"):
        kept = values[f"{wrapper}.lora_A.default.weight"][rank].clone()
        values[f"{wrapper}.lora_A.default.weight"].zero_()
        values[f"{wrapper}.lora_A.default.weight"][rank] = kept
    merged = merge(model, values, dtype=None).weights
    for each, value in before.items():
        changed = (merged[f"model.layers.1.mlp.experts.{each}"] - value).flatten(1).abs().amax(dim=1) > 0
        assert changed.tolist() == [False, True, False, False]


def test_the_base_in_bfloat16_is_rounded_once(export, batch):
    model = adapted("qwen3_moe", rank=4, dtype="bfloat16")
    values = all_values_of(model)
    assert {each.dtype for each in values.values()} == {torch.float32, torch.bfloat16}
    exact = merge(model, values, dtype=torch.float64).weights
    merged = load_file(export(model, values, merge=True).folder / "model.safetensors")
    experts = [name for name in exact if name.endswith("experts.down_proj")]
    assert len(experts) == 2
    for name in experts:
        written = [merged[name.replace("down_proj", f"{number}.down_proj.weight")] for number in range(4)]
        assert torch.equal(torch.stack(written), exact[name].to(torch.bfloat16)), name
