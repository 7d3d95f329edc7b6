"""`final/` of each kind of adapter, loaded by plain peft on the base as it was, gives the trained model's logits."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from finetune.config.sections.model import LoraSection, PeftSection
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")

KINDS = {
    "pissa": LoraSection(rank=2, init="pissa", rank_pattern={"q_proj": 3}, alpha_pattern={"v_proj": 5.0}),
    "pissa with rslora": LoraSection(rank=2, init="pissa", rslora=True, rank_pattern={"k_proj": 4}),
    "olora": LoraSection(rank=2, init="olora", layers=(1,)),
    "ia3": PeftSection(
        type="ia3", values={"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    ),
    "oft": PeftSection(type="oft", values={"oft_block_size": 8, "target_modules": "all-linear"}),
    "prompt": PeftSection(type="prompt_tuning", values={"num_virtual_tokens": 3}),
    "prefix": PeftSection(type="prefix_tuning", values={"num_virtual_tokens": 3}),
}


@pytest.fixture
def adapted(tokenizer):
    """Return a function that gives a model adapters that do something, as after training."""

    def make(model, kind: str):
        made = add_adapter(model, KINDS[kind], AdapterContext(seed=1, tokenizer=tokenizer))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        return made.eval()

    return make


def logits_of(model, batch):
    with torch.no_grad():
        return model.eval()(input_ids=batch, attention_mask=torch.ones_like(batch)).logits[:, -batch.shape[1] :]


def trained_of(model):
    return {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama untied", "qwen3 tied"])
def test_an_adapter_names_its_base_and_leaves_it_unchanged(
    build, load_folder, export, batch, tmp_path, adapted, kind, name
):
    build(name).save_pretrained(tmp_path / "original")
    model = adapted(load_folder(tmp_path / "original"), kind)
    report = export(model, trained_of(model))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "original")
    untouched = logits_of(base, batch)
    loaded = PeftModel.from_pretrained(base, report.folder)
    assert torch.allclose(logits_of(loaded, batch), logits_of(model, batch), atol=1e-5)
    assert not torch.allclose(logits_of(loaded, batch), untouched, atol=1e-3)
    assert json.loads((report.folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "original"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_built_from_a_config_is_written_into_the_adapter_folder(build, export, batch, adapted, kind):
    model = adapted(build(), kind)
    report = export(model)
    base = AutoModelForCausalLM.from_pretrained(report.folder / "base")
    loaded = PeftModel.from_pretrained(base, report.folder)
    assert torch.allclose(logits_of(loaded, batch), logits_of(model, batch), atol=1e-5)
