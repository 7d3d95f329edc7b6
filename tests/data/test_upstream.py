"""The workarounds do what they say, and are still needed."""

import json

import huggingface_hub
import pytest

from finetune.data.upstream import set_datasets_offline, truncating, unrestricted_backend

datasets = pytest.importorskip("datasets")


def test_datasets_still_keeps_its_own_copy_of_the_offline_flag(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert datasets.config.HF_HUB_OFFLINE is False, "it follows huggingface_hub now: remove set_datasets_offline"
    set_datasets_offline(datasets, is_offline=True)
    assert datasets.config.HF_HUB_OFFLINE is True


def test_a_call_with_truncation_still_leaves_it_enabled_in_the_tokenizer(tokenizer):
    tokenizer("one two three", truncation=True, max_length=2)
    assert tokenizer.backend_tokenizer.truncation is not None, "calls leave no state now: remove `truncating`"
    assert unrestricted_backend(tokenizer).truncation is None


@pytest.mark.parametrize("side", ["end", "start"])
def test_after_truncating_neither_side_nor_truncation_stays_set(tokenizer, tmp_path, side):
    with truncating(tokenizer, side):
        cut = tokenizer("one two three", truncation=True, max_length=2)["input_ids"]
    assert len(cut) == 2
    assert tokenizer.truncation_side == "right"
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["truncation"] is None
