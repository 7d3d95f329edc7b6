import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.config.sections.model import Ia3Section, LoraSection, OftSection, PromptTuningSection
from finetune.errors import ModelError
from finetune.model.loading.pretrained import adapter_digest, base_mismatch_warning

BATCH = torch.arange(24).reshape(2, 12)
KINDS = {
    "lora": LoraSection(rank=2, rslora=True, modules_to_save=("lm_head",)),
    "dora": LoraSection(rank=2, dora=True),
    "ia3": Ia3Section(target_modules=("k_proj", "down_proj"), feedforward_modules=("down_proj",)),
    "oft": OftSection(block_size=8),
    "prompt": PromptTuningSection(num_tokens=3),
}


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=BATCH, attention_mask=torch.ones_like(BATCH)).logits


@pytest.fixture
def saved(from_config, build, adapted, tmp_path):
    """Return a function that trains, so to speak, and saves an adapter with plain peft; gives its logits."""

    def save(kind: str):
        made = adapted(build(from_config()), KINDS[kind], noise=0.1)
        made.save_pretrained(tmp_path / "first")
        return logits_of(made)

    return save


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_goes_on_from_what_was_saved_and_learns(from_config, build, adapted, saved, tmp_path, kind):
    expected = saved(kind)
    made = adapted(build(from_config()), tmp_path / "first")
    assert torch.allclose(logits_of(made), expected, atol=1e-6)
    learning = [each for each in made.parameters() if each.requires_grad]
    made(input_ids=BATCH, attention_mask=torch.ones_like(BATCH), labels=BATCH).loss.backward()
    assert learning
    assert all(each.grad is not None for each in learning)


def test_an_adapter_of_another_model_is_refused(from_config, build, adapted, saved, tmp_path):
    saved("dora")
    folder = tmp_path / "first"
    with pytest.raises(
        ModelError, match=r"model\.adapter: Target modules .*model\.layers\.[01]\..* Modules that can be named: c_attn"
    ):
        adapted(build(from_config("gpt2 tied")), folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_A" in name)
    save_file({**tensors, name: torch.zeros(2, 16)}, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"has the shape \(2, 16\).* and \(2, 64\) on this model"):
        adapted(build(from_config()), folder)
    save_file({name: tensors[name]}, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"lacks 41 tensors"):
        adapted(build(from_config()), folder)


def test_a_folder_without_an_adapter_is_told(from_config, build, adapted, tmp_path):
    with pytest.raises(ModelError, match=r"contains no adapter: adapter_config\.json cannot be read"):
        adapted(build(from_config()), tmp_path)
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors cannot be read"):
        adapter_digest(str(tmp_path))


def test_another_base_is_told_or_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/one"}))
    assert base_mismatch_warning(str(tmp_path), name="org/one") is None
    assert "Are they the same weights?" in base_mismatch_warning(str(tmp_path), name="./copy-of-one")
    with pytest.raises(ModelError, match=r"was trained on `org/one`, and model.name is `org/other`"):
        base_mismatch_warning(str(tmp_path), name="org/other")


def test_the_first_adapter_is_known_by_its_content(saved, tmp_path):
    assert adapter_digest(None) is None
    saved("ia3")
    digest = adapter_digest(str(tmp_path / "first"))
    saved("ia3")
    assert adapter_digest(str(tmp_path / "first")) == digest
    saved("oft")
    assert adapter_digest(str(tmp_path / "first")) != digest
