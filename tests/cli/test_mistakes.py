"""Every mistake of a user is one clear message: exit code 2, no traceback, and what to do next. Real processes."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.launching import capture

ROW = {"messages": [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "two one"}]}
JOB = """\
run: {folder: runs/job}
model:
  from_config:
    model_type: llama
    values: {hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2}
  tokenizer: {train: {vocabulary_size: 300}}
data:
  train: {path: train.jsonl}
  max_length: 64
  chat_template: chatml
  cache_folder: cache
task: {name: sft}
train: {global_batch_size: 4, microbatch_size: 2, steps: 2, learning_rate: 1e-3}
"""


@dataclass(frozen=True)
class Mistake:
    """What the user got wrong, and words that the message must hold."""

    name: str
    make: Callable[[Path], None]
    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()


def job(*changes: tuple[str, str]) -> Callable[[Path], None]:
    """Write the job with texts replaced."""

    def make(folder: Path) -> None:
        text = JOB
        for before, after in changes:
            assert before in text
            text = text.replace(before, after)
        (folder / "job.yaml").write_text(text)

    return make


def rows(*lines: str) -> Callable[[Path], None]:
    """Write other rows than the good ones."""
    return lambda folder: (folder / "train.jsonl").write_text("".join(line + "\n" for line in lines))


def occupied(folder: Path) -> None:
    (folder / "runs").write_text("a file where the run's folder should be")


GOOD = json.dumps(ROW)
CONFIG = (
    Mistake("wrong key", job(("max_length", "max_lenght")), ("line 9", "data.max_lenght", "`max_length`")),
    Mistake("broken YAML", job(("task: {name: sft}", "task: {name: sft")), ("line",)),
    Mistake(
        "indivisible batch",
        job(("microbatch_size: 2", "microbatch_size: 3")),
        ("train.global_batch_size", "(3)", "Nearest"),
    ),
    Mistake("missing file", job(("path: train.jsonl", "path: trian.jsonl")), ("data.train.path", "trian.jsonl")),
    Mistake("no config", lambda folder: None, ("job.yaml",)),
    Mistake(
        "environment variable", job(("folder: runs/job", "folder: '${HOME}/runs'")), ("run.folder", "not expanded")
    ),
    Mistake("unwritable output", occupied, ("run.folder",)),
)
DATA = (
    Mistake("missing column in row 17", rows(*[GOOD] * 16, json.dumps({"text": "x"}), GOOD), ("row 17", "messages")),
    Mistake("row too long", job(("max_length: 64", "max_length: 8")), ("longer", "max_length", "over_length")),
    Mistake(
        "preference pairs for sft",
        rows(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"})),
        ("train.jsonl, row 1", "preference pair", "columns: {completion: chosen}"),
    ),
    Mistake("no chat template", job(("  chat_template: chatml\n", "")), ("chat template", "chatml")),
)
LAUNCH = (
    Mistake(
        "batch and processes",
        job(),
        ("global_batch_size", "3 processes"),
        (
            *(("WORLD_SIZE", "3"), ("RANK", "0"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "3")),
            *(("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")),
        ),
    ),
    Mistake(
        "FSDP asked, something else launched",
        job(("folder: runs/job", "folder: runs/job, strategy: fsdp2")),
        ("fsdp2", "single"),
    ),
    Mistake("precisions disagree", job(), ("mixed_precision: bf16", "fp32"), (("ACCELERATE_MIXED_PRECISION", "bf16"),)),
    Mistake(
        "LoRA target that is not there",
        job(("model:\n", "model:\n  lora: {target_modules: [qproj]}\n")),
        ("qproj", "q_proj"),
    ),
)


def ended(folder: Path, mistake: Mistake) -> CompletedProcess[str]:
    """Write a good job, spoil it, and run it."""
    (folder / "train.jsonl").write_text((GOOD + "\n") * 8)
    if mistake.name != "no config":
        job()(folder)
    mistake.make(folder)
    command = [sys.executable, "-m", "finetune", "--config", str(folder / "job.yaml")]
    return capture(command, environment=dict(mistake.variables))


def assert_told(run: CompletedProcess[str], folder: Path, mistake: Mistake) -> None:
    assert run.returncode == 2, run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    assert run.stderr.count("error: ") == 1
    for word in mistake.words:
        assert word in run.stderr
    assert written(folder / "runs" / "job") <= {"status.json"}  # nothing else before everything has been checked


def written(run: Path) -> set[str]:
    """Return what a reader of the run's folder finds, locks left out."""
    return {path.name for path in run.iterdir() if not path.name.startswith(".")} if run.is_dir() else set()


@pytest.mark.parametrize("mistake", CONFIG, ids=lambda mistake: mistake.name)
def test_a_mistake_in_the_config_is_reported(tmp_path, mistake):
    assert_told(ended(tmp_path, mistake), tmp_path, mistake)


@pytest.mark.full
@pytest.mark.skipif(os.environ.get("CUDA_VISIBLE_DEVICES") is not None, reason="written for a machine without a GPU")
@pytest.mark.parametrize("mistake", DATA + LAUNCH, ids=lambda mistake: mistake.name)
def test_a_mistake_in_data_or_launch_is_reported(tmp_path, mistake):
    assert_told(ended(tmp_path, mistake), tmp_path, mistake)


def test_all_problems_of_a_config_are_reported_at_once(tmp_path):
    mistake = Mistake(
        "three at once",
        job(("max_length: 64", "max_lenght: 64"), ("1e-3", "fast"), ("name: sft", "name: stf")),
        ("max_lenght", "train.learning_rate", "task.name"),
    )
    assert_told(ended(tmp_path, mistake), tmp_path, mistake)
