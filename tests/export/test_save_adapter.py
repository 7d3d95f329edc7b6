import json
import shutil

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.config.sections.model import LoraSection
from finetune.errors import ModelError, TrainingError
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from tests.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")


def adapted(model, **keys):
    """Return the model with adapters that do something, as after training."""
    made = add_adapter(model, LoraSection(rank=2, **keys), AdapterContext(seed=1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made.eval()


def values_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def logits_of(model, batch):
    with torch.no_grad():
        return model.eval()(input_ids=batch).logits


SAVED, ADAPTED = {"modules_to_save": ("lm_head",)}, {"target_modules": ("lm_head",)}
KINDS = [{}, {"rslora": True}, {"dora": True}, SAVED, ADAPTED]


@pytest.mark.parametrize("keys", KINDS)
def test_base_and_adapter_loaded_by_peft_alone_give_the_same_logits(architecture_name, build, export, batch, keys):
    is_tied = architecture_name.endswith(" tied")
    if is_tied and (keys == ADAPTED or (keys == SAVED and architecture_name == "gpt2 tied")):
        with refused(ModelError, "`lm_head`"):
            adapted(build(architecture_name), **keys)
        return
    model = adapted(build(architecture_name), **keys)
    with model.disable_adapter():
        untouched = logits_of(model, batch)
    report = export(model)
    base = AutoModelForCausalLM.from_pretrained(report.folder / "base")
    loaded = PeftModel.from_pretrained(base, report.folder)
    assert torch.allclose(logits_of(loaded, batch), logits_of(model, batch), atol=1e-5)
    if is_tied and keys == SAVED:
        head, embeddings = loaded.get_output_embeddings(), loaded.get_input_embeddings()
        assert torch.equal(head.modules_to_save["default"].weight, embeddings.modules_to_save["default"].weight)
    with loaded.disable_adapter():
        assert torch.allclose(logits_of(loaded, batch), untouched, atol=1e-5)
    assert not torch.allclose(logits_of(loaded, batch), untouched, atol=1e-3)  # the adapter does something


def test_from_pretrained_finds_the_base_in_the_adapter_folder(build, export, batch):
    model = adapted(build())
    folder = export(model).folder
    for auto in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        assert torch.allclose(logits_of(auto.from_pretrained(folder), batch), logits_of(model, batch), atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_a_moved_adapter_folder_loads_as_documented_in_its_card(build, export, batch, tmp_path):
    model = adapted(build())
    moved = shutil.move(export(model).folder, tmp_path / "moved")
    assert 'from_pretrained(f"{folder}/base")' in (moved / "README.md").read_text()
    base = AutoModelForCausalLM.from_pretrained(moved / "base")
    assert torch.allclose(logits_of(PeftModel.from_pretrained(base, moved), batch), logits_of(model, batch), atol=1e-5)


def test_a_base_that_has_a_name_is_named_and_not_copied(build, load_folder, export, batch, tmp_path):
    build().save_pretrained(tmp_path / "base-model")
    model = adapted(load_folder(tmp_path / "base-model", dtype="bfloat16"))
    weights = {name: value for name, value in values_of(model).items() if ".lora_" in name}
    report = export(model, weights)
    assert not (report.folder / "base").exists()
    config = json.loads((report.folder / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["inference_mode"]) == (str(tmp_path / "base-model"), True)
    assert {tensor.dtype for tensor in load_file(report.folder / "adapter_model.safetensors").values()} == {
        torch.float32
    }
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base-model", dtype="bfloat16")
    assert torch.equal(logits_of(PeftModel.from_pretrained(base, report.folder), batch), logits_of(model, batch))


def test_the_adapter_written_is_the_one_gathered(build, export, batch):
    """Under ZeRO-3 peft alone writes an adapter of empty tensors (trl#4416, peft#2892)."""
    model = adapted(build())
    expected, weights = logits_of(model, batch), values_of(model)
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    report = export(model, weights)
    tensors = load_file(report.folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * 14
    assert all(tensor.numel() for tensor in tensors.values())
    base = AutoModelForCausalLM.from_pretrained(report.folder / "base")
    assert torch.allclose(logits_of(PeftModel.from_pretrained(base, report.folder), batch), expected, atol=1e-5)


def test_an_adapter_with_an_empty_or_missing_factor_is_refused(build, export, tmp_path):
    model = adapted(build())
    weights = values_of(model)
    factor = next(name for name in weights if "lora_B" in name)
    with refused(TrainingError, "lora_B.default.weight"):
        export(model, {**weights, factor: torch.empty(0)})
    del weights[factor]
    with refused(TrainingError, "1 of 28 weights"):
        export(model, weights)
    assert list(tmp_path.iterdir()) == []


def test_a_base_made_from_its_config_must_be_given_too(build, export):
    model = adapted(build())
    weights = {name: value for name, value in values_of(model).items() if ".lora_" in name}
    with refused(TrainingError, "21 of 21 weights"):
        export(model, weights)
