"""`model.config` changes values of a pre-trained model's config, which are checked and exported."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config

from finetune.config.sections.export import ExportSection
from finetune.config.sections.model import LoraSection, ModelSection
from finetune.errors import ModelError
from finetune.export.card import CardFacts
from finetune.export.save import Preprocessors, export_model
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from finetune.model.loading.architecture import load_pretrained_config
from finetune.model.loading.dry_run import dry_run_model
from finetune.model.loading.load import load_model
from finetune.model.loading.saved import attach_adapters, inspect_model_folder, load_saved_base, load_saved_model
from finetune.runtime.parameters import InitContext
from tests.refusals import refused

SIZES = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128},
}
IDS = torch.arange(60)[None]
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, layer_types=["full_attention", "sliding_attention"]),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Return folders of pre-trained models."""
    folder = tmp_path_factory.mktemp("bases")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return folder


def section(bases, name, **values):
    return ModelSection(name=str(bases / name), config=values)


def loaded(written):
    return load_model(written, head="causal_lm", init_context=InitContext(), seed=0, vocabulary_size=None)


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


SCALING = {
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        **{"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 32,
    },
}
SCALED = {"rope_scaling": {"type": "yarn", "factor": 4.0}}
CHANGES = {
    **{name: {"rope_scaling": scaling} for name, scaling in SCALING.items()},
    "yarn, longer": {"rope_scaling": SCALING["yarn"], "max_position_embeddings": 512},
    "rope_parameters": {"rope_parameters": {**SCALING["linear"], "rope_theta": 5000.0}},
    "rope_theta": {"rope_theta": 5000.0},
    "activation": {"hidden_act": "gelu"},
    "norm": {"rms_norm_eps": 1e-2},
}


def trained(model):
    """Change every trained weight, as a step does."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    return model


def exported(folder, model, written, *, weights=None, merge=False):
    facts = CardFacts("run", "sft", num_steps=1, metrics={}, config_text="", config_values=written.config)
    weights = weights or {name: each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())}
    inputs = Preprocessors(None)
    export_model(
        folder, model=model, weights=weights, preprocessors=inputs, section=ExportSection(merge=merge), facts=facts
    )
    return folder


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_plain_transformers_gives_the_logits_of_the_trained_model(tmp_path, bases, name, change):
    written = section(bases, name, **CHANGES[change])
    dry_run_model(written, head="causal_lm")
    model = trained(loaded(written))
    folder = exported(tmp_path / "final", model, written)
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model), atol=1e-6)
    config = json.loads((folder / "config.json").read_text())
    for key, value in CHANGES[change].items():
        kept = config["rope_parameters"] if key.startswith("rope") else config
        assert (value.items() <= kept.items()) if isinstance(value, dict) else kept[key] == value
    before = AutoModelForCausalLM.from_pretrained(bases / name, config=AutoConfig.from_pretrained(bases / name))
    before.load_state_dict(model.state_dict())
    assert not torch.allclose(logits(before), logits(model), atol=1e-4)  # the change is one


def test_a_model_of_several_kinds_of_layers_scales_one_of_them(bases):
    scaled = {"rope_scaling": {"full_attention": SCALING["linear"]}}
    config = load_pretrained_config(section(bases, "gemma3", **scaled))
    assert config.rope_parameters["full_attention"]["factor"] == 4.0
    assert config.rope_parameters["sliding_attention"] == CONFIGS["gemma3"].rope_parameters["sliding_attention"]
    with refused(ModelError, "model.config.rope_scaling", "full_attention, sliding_attention"):
        load_pretrained_config(section(bases, "gemma3", rope_scaling=SCALING["linear"]))


@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_brings_the_config_with_which_its_base_is_loaded(tmp_path, bases, merge):
    written = section(bases, "llama", rope_scaling=SCALING["yarn"], attention_dropout=0.25)
    model = trained(add_adapter(loaded(written), LoraSection(rank=2), AdapterContext(seed=1)))
    folder = exported(tmp_path / "final", model, written, merge=merge)
    card = (folder / "README.md").read_text()
    if merge:
        plain = AutoModelForCausalLM.from_pretrained(folder)
    else:
        assert "other values of `rope_scaling`, `attention_dropout`" in card
        assert 'config=AutoConfig.from_pretrained(f"{folder}/config"))' in card
        config = AutoConfig.from_pretrained(folder / "config")
        assert (config.attention_dropout, config.use_cache) == (0.25, True)
        base = AutoModelForCausalLM.from_pretrained(bases / "llama", config=config)
        plain = PeftModel.from_pretrained(base, folder)
    assert torch.allclose(logits(plain), logits(model), atol=1e-5)
    ours = load_saved_model(inspect_model_folder(folder, key="chat"), key="chat")
    assert torch.allclose(logits(ours), logits(model), atol=1e-5)


def test_adapters_of_other_configs_are_not_put_on_one_base(tmp_path, bases):
    folders = {}
    for name, values in (("plain", {}), ("scaled", {"rope_scaling": SCALING["yarn"]}), ("again", SCALED)):
        written = section(bases, "llama", **values)
        model = add_adapter(loaded(written), LoraSection(rank=2), AdapterContext(seed=1))
        folders[name] = exported(tmp_path / name, model, written)
    bare = load_saved_base(inspect_model_folder(folders["scaled"], key="chat"), key="chat")
    with refused(ModelError):
        attach_adapters(bare, {"one": folders["scaled"], "two": folders["plain"]}, key="chat")
    both = attach_adapters(bare, {"one": folders["scaled"], "two": folders["again"]}, key="chat")
    assert sorted(both.peft_config) == ["one", "two"]
    plain = load_saved_base(inspect_model_folder(folders["plain"], key="chat"), key="chat")
    with refused(ModelError, "rope_parameters"):
        attach_adapters(plain, {"one": folders["scaled"]}, key="chat")


def test_an_adapter_of_an_unchanged_base_brings_no_config(tmp_path, bases):
    written = section(bases, "llama")
    model = add_adapter(loaded(written), LoraSection(rank=2), AdapterContext(seed=1))
    folder = exported(tmp_path / "final", model, written)
    assert not (folder / "config").exists()
    assert "AutoConfig" not in (folder / "README.md").read_text()


REFUSED = [
    ({"atention_dropout": 0.1}, "`attention_dropout`"),
    ({"attention_dropout": "a lot"}, "attention_dropout"),
    ({"hidden_act": "gellu"}, "'gellu'"),
    ({"hidden_size": 64}, "hidden_size"),
    ({"num_hidden_layers": 1}, "num_hidden_layers"),
    ({"num_key_value_heads": 4}, "num_key_value_heads"),
    ({"head_dim": 16, "rms_norm_eps": 1e-3}, "head_dim"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"attention_bias": True}, "attention_bias"),
    ({"vocab_size": 65}, "vocab_size"),
    ({"dtype": "bfloat16"}, "`model.dtype`"),
    ({"use_cache": True}, "use_cache"),
    ({"num_labels": 3}, "num_labels"),
    ({"rope_scaling": {"factor": 2.0}}, "rope_scaling: `rope_type`"),
    ({"rope_scaling": {"rope_type": "yarm", "factor": 2.0}}, "`yarn`"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "'factor'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "facto": 1}}, "'facto'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, ">= 1, got x"),
    ({"rope_scaling": "yarn"}, "rope_scaling"),
    ({"rope_scaling": SCALING["yarn"], "rope_parameters": SCALING["yarn"]}, "rope_parameters"),
]


@pytest.mark.parametrize(("values", "fact"), REFUSED)
def test_config_values_that_are_unused_or_do_not_fit_the_weights_are_rejected(bases, values, fact):
    with refused(ModelError, "model.config", fact):
        dry_run_model(section(bases, "llama", **values), head="causal_lm")
