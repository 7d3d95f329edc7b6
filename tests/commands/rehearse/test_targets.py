"""Names of the job are matched with the real model, and written for the small one."""

import json

import pytest

from finetune.commands.rehearse.small_model import shrink_architecture
from finetune.commands.rehearse.targets import check_targets, match_targets, real_layer, small_layer
from finetune.commands.rehearse.widths import Sizes
from finetune.config.load import load_config
from finetune.config.sections.model import FromConfigSection, ModelSection
from finetune.errors import ModelError
from finetune.model.layers import LayerStack

LLAMA = {
    "hidden_size": 512,
    "num_hidden_layers": 32,
    "num_attention_heads": 8,
    "vocab_size": 300,
    "intermediate_size": 1024,
}


@pytest.fixture(scope="module")
def architecture():
    section = ModelSection(from_config=FromConfigSection(model_type="llama", values=LLAMA))
    return shrink_architecture(section, head="causal_lm", sizes=Sizes())


def matched(job, architecture, *overrides):
    """Return the new values of the keys that change, and the lines about names in the real model."""
    sets = [
        "model.name=null",
        f'model.from_config={{"model_type": "llama", "values": {json.dumps(LLAMA)}}}',
        "model.tokenizer.train={}",
    ]
    config = load_config(job, [*sets, *overrides]).config
    lines = list(check_targets(config, architecture))
    return {change.key: change.now for change in match_targets(config, architecture)}, lines


def test_patterns_that_select_no_layers_are_unchanged(job, architecture):
    changed, lines = matched(job, architecture, 'model.freeze=["model.embed_tokens.*", "*.mlp.*"]')
    assert changed == {} and "parameters of the real model are trained" in lines[0]


def test_the_last_real_layer_is_mapped_to_the_last_small_one(job, architecture):
    names = matched(job, architecture, 'model.train_only=["model.layers.31.*"]')[0]["model.train_only"]
    assert names and all(name.startswith("model.layers.1.") for name in names)


def test_a_middle_layer_is_mapped_by_its_depth(job, architecture):
    names = matched(job, architecture, 'model.freeze=["model.layers.20.self_attn.*"]')[0]["model.freeze"]
    assert all(name.startswith("model.layers.1.self_attn.") for name in names) and len(names) == 4


def test_layers_of_lora_are_mapped_to_the_small_model(job, architecture):
    found, _ = matched(job, architecture, "model.lora.layers=[0, 1, 2]", "model.lora.rank=4")
    assert found == {"model.lora.layers": [0]}
    found, _ = matched(job, architecture, f"model.lora.layers={list(range(16, 32))}")
    assert found == {"model.lora.layers": [1]}


def test_a_target_module_of_one_layer_is_mapped(job, architecture):
    found, _ = matched(job, architecture, 'model.lora.target_modules=["layers.31.self_attn.q_proj", "v_proj"]')
    assert found == {"model.lora.target_modules": ["model.layers.1.self_attn.q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.lora.layers=[40]", "layer 40 does not exist in the real model, which has 32"),
        ('model.lora.target_modules=["q_prj"]', "no module is named `q_prj`. Did you mean `q_proj`"),
        ('model.freeze=["model.layers.32.*"]', "model.freeze: no parameter matches `model.layers.32"),
        ('train.unfreeze=[{"patterns": ["head.*"], "after_steps": 2}]', "train.unfreeze.0.patterns: no parameter"),
        ("train.optimizer.rates={'*embeds*': 0.1}", "train.optimizer.rates: no parameter"),
    ],
)
def test_a_name_that_matches_nothing_in_the_real_model_is_refused(job, architecture, override, message):
    with pytest.raises(ModelError, match=message.replace(".", r"\.").replace("*", r"\*")):
        matched(job, architecture, override)


def test_a_layer_is_mapped_to_one_of_its_kind_and_depth():
    real, small = LayerStack("layers", ("a", "b") * 8), LayerStack("layers", ("a", "b"))
    assert [small_layer(index, real=real, small=small) for index in (0, 14, 1, 15)] == [0, 0, 1, 1]
    assert [real_layer(index, real=real, small=small) for index in (0, 1)] == [0, 15]
