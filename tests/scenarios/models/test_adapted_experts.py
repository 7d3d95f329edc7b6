"""LoRA on mixtures of experts resumes under another strategy, and merges what it has trained there."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.task_cases.experts import CASES, LORA
from tests.task_cases.language import loss_of_answers
from tests.task_cases.runs import launch, prepare

pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.timeout(900)]

KEYS = (LORA, "checkpoint.every_steps=2", "export.merge=true")
VARIANTS = {"straight": KEYS, "resumed": (*KEYS, "train.stop_after_steps=2")}


def test_a_run_resumes_under_another_strategy_and_is_merged(tmp_path):
    case = next(replace(each, variants=VARIANTS) for each in CASES if each.name == "lora_deepseek_v3")
    prepare([case], tmp_path)
    straight = launch("zero3", [(case, name) for name in VARIANTS], tmp_path, name="run")[case.name, "straight"]
    rest = replace(case, variants={"resumed": KEYS})
    resumed = launch("fsdp2", [(rest, "resumed")], tmp_path, name="run")[case.name, "resumed"]
    assert straight.error is None and resumed.error is None
    assert len(straight.losses) == 4
    assert resumed.losses[-2:] == pytest.approx(straight.losses[-2:], rel=1e-4)
    assert loss_of_answers(resumed.final, tmp_path / case.name) == pytest.approx(resumed.metrics["loss"], rel=1e-4)
    models = [AutoModelForCausalLM.from_pretrained(left.final).state_dict() for left in (straight, resumed)]
    assert models[0].keys() == models[1].keys()
    for name, value in models[0].items():
        assert torch.allclose(models[1][name], value, atol=1e-4), name
