"""The skeleton of a model is made on one rank alone, whatever the others do."""

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, modeling_utils

from finetune.export.weights import build_meta_model

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}


def test_the_parts_of_a_model_do_not_speak_to_other_ranks_under_zero3(monkeypatch):
    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", "vocab_size": 32, **SMALL},
        vision_config={"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, **SMALL},
    )
    model = AutoModelForImageTextToText.from_config(config)
    asked = []

    def is_enabled():
        asked.append(True)
        return True

    monkeypatch.setattr(modeling_utils, "is_deepspeed_zero3_enabled", is_enabled)
    skeleton = build_meta_model(model, dtype=torch.float32)  # zero.Init would fail here without a process group
    assert asked
    assert [name for name, _ in skeleton.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(parameter.is_meta for parameter in skeleton.parameters())
