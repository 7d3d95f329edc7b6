"""The skeleton of a model is made on one rank alone, whatever the others do."""

import threading
import time

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, modeling_utils

from finetune.errors import TrainingError
from finetune.export import weights
from finetune.export.weights import build_meta_model, map_in_threads, num_threads_for

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


def product(seed):
    chance = torch.Generator().manual_seed(seed)
    one, other = (torch.randn(64, 300, generator=chance, dtype=torch.float64) for _ in range(2))
    return one @ other.T


def test_the_order_is_kept_and_the_bits_are_those_of_one_thread():
    alone, several = (map_in_threads(product, range(20), num_threads=number) for number in (1, 4))
    assert all(map(torch.equal, alone, several))
    assert torch.equal(several[3], product(3))


def test_items_are_worked_on_at_once_each_with_one_thread_of_torch_and_without_gradients():
    together = threading.Barrier(3, timeout=20)
    before = torch.get_num_threads()

    def meet(item):
        together.wait()
        return torch.get_num_threads(), torch.is_grad_enabled()

    assert map_in_threads(meet, range(3), num_threads=3) == [(1, False)] * 3
    assert torch.get_num_threads() == before


def test_the_first_error_is_raised_and_the_rest_is_not_begun():
    begun = []

    def work(item):
        begun.append(item)
        if item == 0:
            raise TrainingError("not finite")
        time.sleep(0.01)

    with pytest.raises(TrainingError, match="not finite"):
        map_in_threads(work, range(1000), num_threads=2)
    assert len(begun) < 1000


def test_threads_are_bounded_by_cores_and_by_memory(monkeypatch):
    monkeypatch.setattr(weights, "usable_cores", lambda: 64)
    monkeypatch.setattr(weights, "available_bytes", lambda: 100)
    assert num_threads_for() == 16
    assert num_threads_for(10) == 5
    assert num_threads_for(1000) == 1
