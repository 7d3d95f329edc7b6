"""LoRA on mixtures of experts: adapters of fused matrices, shared experts, dense layers and routers."""

import json
from pathlib import Path

import yaml

from tests.model.moe_models import MOE_MODELS
from tests.task_cases.case import Case
from tests.task_cases.language import SFT, conversations, loss_of_answers

LORA = "model.lora={rank: 4, alpha: 8.0}"
WITH_ROUTER = "model.lora={rank: 4, alpha: 8.0, router: true, rslora: true}"


def job_of(model_type: str) -> str:
    """Return the `sft` job with a model of this type."""
    job = yaml.safe_load(SFT)
    job["model"]["from_config"] = {"model_type": model_type, "values": MOE_MODELS[model_type]}
    return yaml.safe_dump(job)


def loss_with_adapted_experts(final: Path, folder: Path) -> float:
    """Return the loss of a folder in which every matrix of experts has an adapter."""
    config = json.loads((final / "adapter_config.json").read_text())
    assert any(name.endswith("experts.gate_up_proj") for name in config["target_parameters"])
    return loss_of_answers(final, folder)


CASES = tuple(
    Case(
        f"lora_{model_type}",
        job_of(model_type),
        conversations,
        "loss",
        loss_with_adapted_experts,
        {"lora": (LORA,), "router": (WITH_ROUTER,)},
        is_extra=model_type in ("mixtral", "qwen3_moe"),
    )
    for model_type in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
)
