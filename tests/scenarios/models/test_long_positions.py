"""What was trained beyond a model's positions, by YaRN, is what plain transformers and peft load from the export."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune.config.load import load_config
from finetune.run.train import train_from_config
from finetune.runtime import distributed
from tests.scenarios.trained import forget, stay

pytestmark = pytest.mark.full

FACTOR, POSITIONS = 4.0, 32
YARN = f"model.rope_scaling={{rope_type: yarn, factor: {FACTOR}}}"
LORA = "model.lora={rank: 4, alpha: 8.0}"
MERGED = (LORA, "export={verify: true, merge: true}")
QUICK = ["train.steps=4", "checkpoint.every_steps=4", "evaluate=null", "data.validation=null", "export.verify=true"]


@pytest.fixture
def train(job, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(distributed, "shut_down", stay)

    def start(name, *overrides):
        try:
            train_from_config(load_config(job, [f"run.folder={tmp_path / name}", *QUICK, *overrides]))
        finally:
            forget()
        return tmp_path / name / "final", capsys.readouterr().out

    return start


def logits(model, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = tokenizer("one two three four five six seven eight nine ten " * 3, return_tensors="pt")
    assert rows["input_ids"].shape[1] > POSITIONS
    with torch.no_grad():
        return model.eval()(**rows).logits


@pytest.mark.parametrize("overrides", [(), (LORA,), MERGED], ids=["full", "adapter", "merged"])
def test_an_export_with_extended_positions_gives_the_logits_of_transformers(train, tmp_path, overrides):
    base, _ = train("base", f"model.from_config.values.max_position_embeddings={POSITIONS}")
    names = ("model.from_config=null", "model.tokenizer=null", f"model.name={base}")
    final, said = train("scaled", *names, YARN, *overrides)
    assert "verified in a fresh process in" in said and "logits of 4 rows within" in said
    is_adapter = overrides == (LORA,)
    config = AutoConfig.from_pretrained(final / "config" if is_adapter else final)
    assert config.rope_parameters["rope_type"] == "yarn" and config.rope_parameters["factor"] == FACTOR
    assert config.max_position_embeddings == FACTOR * POSITIONS

    def load(config=None):
        if not is_adapter:
            return AutoModelForCausalLM.from_pretrained(final, config=config)
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, config=config), final)

    loaded = logits(load(config if is_adapter else None), final)
    unscaled = AutoConfig.from_pretrained(base)
    assert not torch.allclose(logits(load(unscaled), final), loaded, atol=1e-3), "YaRN changes nothing here"
    merged, _ = train("again", *names, YARN, *(MERGED if is_adapter else overrides))
    again = logits(AutoModelForCausalLM.from_pretrained(merged), merged)
    torch.testing.assert_close(again, loaded, atol=1e-5, rtol=1e-5)
    assert json.loads((final.parent / "final.json").read_text())["export"]["verify"] is True
