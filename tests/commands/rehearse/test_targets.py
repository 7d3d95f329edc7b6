"""Names of the job are matched with the real model, and written for the small one."""

import json

import pytest

from finetune.commands.rehearse.architecture import shrink_architecture
from finetune.commands.rehearse.shrink import Sizes
from finetune.commands.rehearse.targets import match_targets
from finetune.config.load import load_config
from finetune.config.sections.model import FromConfigSection, ModelSection
from finetune.errors import ModelError

LLAMA = {
    **{"hidden_size": 512, "num_hidden_layers": 32, "num_attention_heads": 8},
    **{"vocab_size": 300, "intermediate_size": 1024},
}


@pytest.fixture(scope="module")
def architecture():
    section = ModelSection(from_config=FromConfigSection(model_type="llama", values=LLAMA))
    return shrink_architecture(section, head="causal_lm", sizes=Sizes())


def matched(job, architecture, *overrides):
    sets = [
        "model.name=null",
        f'model.from_config={{"model_type": "llama", "values": {json.dumps(LLAMA)}}}',
        "model.tokenizer.train={}",
    ]
    return match_targets(load_config(job, [*sets, *overrides]).config, architecture)


def test_names_without_layers_stay_as_they_are(job, architecture):
    targets = matched(job, architecture, 'model.freeze=["model.embed_tokens.*", "*.mlp.*"]')
    assert targets.overrides == {} and targets.changes == ()
    assert "parameters of the real model are trained" in targets.matched[0]


def test_the_last_layer_stays_the_last(job, architecture):
    targets = matched(job, architecture, 'model.train_only=["model.layers.31.*"]')
    names = targets.overrides["model.train_only"]
    assert names and all(name.startswith("model.layers.1.") for name in names)


def test_a_layer_in_the_middle_is_stood_for_by_the_one_as_deep(job, architecture):
    names = matched(job, architecture, 'model.freeze=["model.layers.20.self_attn.*"]').overrides["model.freeze"]
    assert all(name.startswith("model.layers.1.self_attn.") for name in names) and len(names) == 4


def test_layers_of_lora_are_mapped(job, architecture):
    found = matched(job, architecture, "model.lora.layers=[0, 1, 2]", "model.lora.rank=4").overrides
    assert found == {"model.lora.layers": [0]}
    found = matched(job, architecture, f"model.lora.layers={list(range(16, 32))}").overrides
    assert found == {"model.lora.layers": [1]}


def test_a_target_with_its_layer_is_mapped(job, architecture):
    found = matched(job, architecture, 'model.lora.target_modules=["layers.31.self_attn.q_proj", "v_proj"]').overrides
    assert found == {"model.lora.target_modules": ["model.layers.1.self_attn.q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.lora.layers=[40]", "no layer 40 in the real model, which has 32"),
        ('model.lora.target_modules=["q_prj"]', "no module is named `q_prj`. Did you mean `q_proj`"),
        ('model.freeze=["model.layers.32.*"]', "no parameter of the real model matches `model.layers.32"),
        ('train.unfreeze=[{"patterns": ["head.*"], "after_steps": 2}]', "train.unfreeze.0.patterns: no parameter"),
        ("train.optimizer.rates={'*embeds*': 0.1}", "train.optimizer.rates: no parameter"),
    ],
)
def test_a_name_that_the_real_model_lacks_is_refused(job, architecture, override, message):
    with pytest.raises(ModelError, match=message.replace(".", r"\.").replace("*", r"\*")):
        matched(job, architecture, override)
