"""Jobs of three sizes, and plans of them by a stand-in for the symbolic step."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.commands.plan.output import Plan
from finetune.commands.plan.plan import PlanOptions, make_plan
from finetune.config.load import load_config
from tests.commands.plan.estimates import GPT_125M, LLAMA_8B, LLAMA_70B

JOB = """
run: {{folder: run}}
model:
  from_config:
    model_type: llama
    values: {{hidden_size: {hidden}, intermediate_size: {intermediate}, num_hidden_layers: {layers},
              num_attention_heads: {heads}, num_key_value_heads: {kv_heads}, vocab_size: {vocabulary}}}
  tokenizer: {{train: {{vocabulary_size: 330}}}}
  dtype: {dtype}
  kernels: none  # whatever is installed here
  gradient_checkpointing: true
  {lora}
data:
  train: {{path: rows.jsonl, format: text}}
  max_length: {length}
  over_length: drop
  cache_folder: cache
task: {{name: pretrain}}
train: {{global_batch_size: 64, microbatch_size: 1, steps: 1000, learning_rate: 1e-4, precision: bf16}}
"""

_NAMES = ("hidden", "intermediate", "layers", "heads", "kv_heads", "vocabulary", "length", "dtype")
SHAPES: dict[str, dict[str, Any]] = {
    size: dict(zip(_NAMES, values, strict=True))
    for size, values in {
        "8b": (4096, 14336, 32, 32, 8, 128256, 4096, "float32"),
        "70b": (8192, 28672, 80, 64, 8, 128256, 2048, "bfloat16"),
        "125m": (768, 3072, 12, 12, 12, 50304, 1024, "float32"),
    }.items()
}
ESTIMATES = {"8b": LLAMA_8B, "70b": LLAMA_70B, "125m": GPT_125M}


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the job of a size; its data is there and not prepared."""

    def write(size: str) -> Path:
        (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n')
        lora = "lora: {rank: 16}" if size == "70b" else ""
        path = tmp_path / f"{size}.yaml"
        path.write_text(JOB.format(lora=lora, **SHAPES[size]))
        return path

    return write


@pytest.fixture
def planned(job_file: Callable[..., Path]) -> Callable[..., Plan]:
    """Return a function that plans the job of a size on machines: `planned("8b", gpus="8xH100")`."""

    def run(size: str, *overrides: str, predict: Any = None, **options: Any) -> Plan:
        loaded = load_config(job_file(size), overrides)
        return make_plan(loaded, PlanOptions(**options), predict=predict or ESTIMATES[size])

    return run


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this machine be one without a GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that has this machine be one with GPUs of these names."""

    def have(*names: str, memory: int = 80 << 30) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: len(names))
        monkeypatch.setattr("torch.cuda.get_device_name", lambda index: names[index])
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(total_memory=memory))

    return have
