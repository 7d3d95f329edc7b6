"""What every contestant but the product begins with: the workload of a folder and its model."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from finetune.runtime.optional import require

from contest.workloads import Workload


def load_workload(folder: Path) -> Workload:
    """Return the folder's workload."""
    return Workload.of(json.loads((folder / "workload.json").read_text()))


def load_model(folder: Path, workload: Workload) -> Any:
    """Return the model in float32, with its adapter where there is one."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, local_files_only=True)
    if workload.lora:
        peft = require("peft", extra="benchmark", purpose="the workload with LoRA")
        return peft.PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    return model
