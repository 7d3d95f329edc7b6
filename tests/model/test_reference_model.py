"""The reference computes the outputs of the initial model, regardless of what adapters have been trained to."""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config.sections.model import ModelSection
from finetune.model.frozen_models import reference_identity, reference_is_base, reference_mode
from tests.small_models import TINY

CONFIG = LlamaConfig(vocab_size=32, num_key_value_heads=2, initializer_range=0.3, **TINY)
IDS = torch.tensor([[3, 4, 5, 6]])


def section(**keys) -> ModelSection:
    return ModelSection.model_validate({"name": "org/model", **keys})


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits[:, -IDS.shape[1] :]


@pytest.fixture
def base():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def test_trained_adapters_are_disabled_in_reference_mode(base):
    before = logits(base)
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model = get_peft_model(base, lora).eval()
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    learns = {name: each.requires_grad for name, each in model.named_parameters()}
    after = logits(model)
    with reference_mode(model, section(lora={})):
        torch.testing.assert_close(logits(model), before)
        assert {name: each.requires_grad for name, each in model.named_parameters()} == learns
    torch.testing.assert_close(logits(model), after)
    assert not torch.allclose(after, before)


def test_trained_prompt_embeddings_are_bypassed_in_reference_mode(base):
    before = logits(base)
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    after = logits(model)
    with reference_mode(model, section(peft={"type": "prompt_tuning", "values": {"num_virtual_tokens": 3}})):
        torch.testing.assert_close(logits(model), before)
    torch.testing.assert_close(logits(model), after)
    assert not torch.allclose(after, before)


@pytest.mark.parametrize("init", ["pissa", "olora", "loftq"])
def test_an_adapter_that_contains_a_part_of_the_base_stays_enabled_in_reference_mode(base, init):
    assert not reference_is_base(section(lora={"init": init}))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    after = logits(model)
    with reference_mode(model, section(lora={"init": init})):
        torch.testing.assert_close(logits(model), after)


def identity(tmp_path, *, weights=b"weights", **keys):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(weights)
    return reference_identity(section(name=str(tmp_path), **keys), seed=1, model=None, log=print)


def test_new_adapters_are_not_part_of_the_identity_of_the_reference(tmp_path):
    plain = identity(tmp_path)
    assert identity(tmp_path, lora={"rank": 4}) == plain
    assert identity(tmp_path, freeze=["*.bias"], gradient_checkpointing=True) == plain
    assert identity(tmp_path, lora={"init": "pissa"}) != plain
    assert identity(tmp_path, dtype="bfloat16") != plain
    assert identity(tmp_path, weights=b"others") != plain
