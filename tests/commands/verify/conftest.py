"""Folders with a model or an adapter, and a function that verifies a server of any of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from finetune.commands.verify.comparison import EngineComparison
from finetune.commands.verify.expected import ExpectedResults, compute_expected
from finetune.commands.verify.openai_client import OpenAIModel
from finetune.commands.verify.serving import compare_served
from finetune.export.engines import ENGINES
from finetune.model.loading.saved import inspect_model_folder
from tests.serving_folders import make_model, make_tokenizer, save
from tests.serving_server import ServedFolder, running

Verify = Callable[..., EngineComparison]


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def full(tmp_path_factory, tokenizer) -> Path:
    """A tied Llama with scaled positions, as `final/` of a run."""
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    model = make_model("llama", vocabulary_size=len(tokenizer), rope_parameters=scaling)
    return save(model, tokenizer, tmp_path_factory.mktemp("full") / "final")


@pytest.fixture(scope="session")
def adapter(tmp_path_factory, tokenizer) -> Path:
    """An adapter of attention, experts, head and embeddings of a mixture of experts, as `final/` of a run."""
    folder = tmp_path_factory.mktemp("adapter")
    base = make_model("qwen3_moe", vocabulary_size=len(tokenizer))
    save(base, tokenizer, folder / "base")
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "lm_head"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        modules_to_save=["embed_tokens"],
        task_type="CAUSAL_LM",
    )
    base.name_or_path = str(folder / "base")
    model = get_peft_model(base, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder / "final")
    tokenizer.save_pretrained(folder / "final")
    base.generation_config.save_pretrained(folder / "final")
    return folder / "final"


@pytest.fixture(scope="session")
def verify() -> Verify:
    """Return a function that compares a server of one folder with another folder, whose results are computed once."""
    expected: dict[tuple[Path, str | None], ExpectedResults] = {}

    def run(
        folder: Path, *, served: Path | None = None, dtype: Any = torch.float32, expected_dtype: str | None = None
    ) -> EngineComparison:
        key = folder, expected_dtype
        if key not in expected:
            saved = inspect_model_folder(folder, key="folder")
            expected[key] = compute_expected(saved, base=None, rows=None, dtype=expected_dtype, trust_remote_code=False)
        with running(ServedFolder(served or folder, dtype=dtype)) as url:
            model = OpenAIModel(ENGINES["vllm"], url, timeout_seconds=60.0)
            model.choose(None, folder=folder)
            return compare_served(model, expected[key])

    return run
