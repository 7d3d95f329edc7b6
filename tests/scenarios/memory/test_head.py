"""Only targets reach the head, under every strategy; and sharding a model costs no memory at the head."""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.devices import EVERY_DEVICE, ON_GPU
from tests.launching import accelerate_command, run
from tests.small_job import WORDS
from tests.task_cases import CASES
from tests.task_cases.runs import prepare

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]
full = pytest.mark.full

VOCABULARY = 30_011
LORA, BF16, SMOOTHED = "model.lora={rank: 4, alpha: 8.0}", "train.precision=bf16", "task.label_smoothing=0.1"

JOB = """
run: {{folder: runs/head, seed: 7}}
model:
  from_config:
    model_type: {model_type}
    values:
      {{hidden_size: {hidden}, intermediate_size: {inner}, num_hidden_layers: {layers}, num_attention_heads: {heads},
       num_key_value_heads: {heads}, head_dim: {head}, max_position_embeddings: 8192, vocab_size: {vocabulary},
       tie_word_embeddings: {tied}}}
  tokenizer: {{train: {{vocabulary_size: 320}}}}
data: {{train: {{path: train.jsonl}}, max_length: {length}, chat_template: chatml, cache_folder: cache}}
task: {{name: sft}}
train: {{global_batch_size: {global_batch}, microbatch_size: {microbatch}, steps: 2, learning_rate: 1e-3,
  try_longest_batch: never}}
report: {{console: plain}}
"""

GLOBAL_BATCH = 24
"""Samples of a step: 1, 2 and 4 processes take whole microbatches of 2, 4 and 6 of it."""

SMALL = {"hidden": 32, "inner": 64, "layers": 2, "heads": 4, "head": 8, "length": 128, "microbatch": 2}
MODELS = {
    "llama": {**SMALL, "model_type": "llama", "tied": "true"},
    "untied": {**SMALL, "model_type": "llama", "tied": "false"},
    "capped": {**SMALL, "model_type": "gemma2", "tied": "true"},  # `final_logit_softcapping` is 30 by default
}

JOBS = {
    "all weights": ("llama", []),
    "head saved with the adapter": ("untied", ["model.lora={rank: 4, modules_to_save: [lm_head]}"]),
    "adapter in the head": ("untied", ["model.lora={rank: 4, target_modules: [q_proj, lm_head]}", BF16]),
    "capped, smoothed, bf16": ("capped", [BF16, SMOOTHED, "train.loss_kernel=chunked"]),
}

ON_ONE_GPU = {"hidden": 512, "inner": 1024, "layers": 4, "heads": 8, "head": 64, "length": 1024, "microbatch": 4}

STRATEGIES = [
    ("cpu", "fsdp2", 2),
    *(pytest.param("cuda", name, 1, marks=ON_GPU) for name in ("single", "ddp", "fsdp2", "zero3")),
]
"""With the device and the number of processes: NCCL takes one of a GPU."""


@dataclass(frozen=True)
class Spec:
    """Jobs to be run in one launch, by their folders."""

    folder: Path

    def add(self, name: str, job: Path, overrides: list[str], *, vocabulary: int = VOCABULARY) -> None:
        known = json.loads(self._path.read_text()) if self._path.exists() else []
        folder = f"run.folder={self.folder / name}"
        known.append({"job": str(job), "overrides": [folder, *overrides], "vocabulary": vocabulary})
        self._path.write_text(json.dumps(known))

    def launch(self, strategy: str, *, processes: int) -> dict[str, list[dict[str, Any]]]:
        """Run the jobs (`single`: without a launcher) and return the records of all ranks by job."""
        words, log = ["-m", "tests.scenarios.memory.head_program", str(self._path)], self.folder / "log.txt"
        alone = [sys.executable, *words]
        command = alone if strategy == "single" else accelerate_command(strategy, *words, processes=processes)
        code = run(command, log=log, timeout_seconds=900)
        assert code == 0, log.read_text(errors="replace")[-4000:]
        names = [path.parent.name for path in self.folder.glob("*/head-0.json")]
        return {name: [self._record(name, rank) for rank in range(processes)] for name in names}

    def _record(self, name: str, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name / f"head-{rank}.json").read_text())
        return found

    @property
    def _path(self) -> Path:
        return self.folder / "spec.json"


@pytest.mark.parametrize(("device", "strategy", "processes"), STRATEGIES)
def test_only_targets_reach_the_head(device, strategy, processes, tmp_path, figure):
    _skip_without(strategy)
    spec = Spec(tmp_path)
    for name, (model, overrides) in JOBS.items():
        sizes = {**MODELS[model], **(ON_ONE_GPU if device == "cuda" else {})}
        job = _write_job(tmp_path / model, sizes, vocabulary=128_011 if device == "cuda" else VOCABULARY)
        spec.add(name, job, overrides, vocabulary=128_011 if device == "cuda" else VOCABULARY)
    records = spec.launch(strategy, processes=processes)
    assert records.keys() == JOBS.keys()
    for name, of_ranks in records.items():
        for calls in (each["calls"] for each in of_ranks):
            assert len(calls) == 2 * GLOBAL_BATCH // processes // (4 if device == "cuda" else 2), name
            for call in calls:
                assert call["rows"] == [call["targets"]], name
                assert call["targets"] < call["positions"]
        share = max(call["largest"] / call["targets"] for each in of_ranks for call in each["calls"])
        figure(f"rows at the head over targets, {strategy}, {name}", share, at_most=1.0)


TASK_CASES = {case.name: case for case in CASES}
TASKS = {
    **dict.fromkeys(("sft", "pretrain", "masked_lm", "seq2seq", "distillation", "distillation_cached"), ""),
    **dict.fromkeys(("dpo", "orpo", "kto"), "./base"),
    "vision_language_sft": "",
}
"""The tasks with a head over a vocabulary; where the job names a saved model, the tokenizer is there, too."""


@full
def test_only_targets_of_any_task_reach_the_head(tmp_path):
    _skip_without("zero3")
    prepare([TASK_CASES[name] for name in TASKS], tmp_path / "cases")
    spec = Spec(tmp_path / "runs")
    spec.folder.mkdir()
    for name, saved in TASKS.items():
        spec.add(name, tmp_path / "cases" / name / "job.yaml", _with_large_vocabulary(name, saved))
    records = spec.launch("zero3", processes=2)
    assert records.keys() == TASKS.keys()
    for name, of_ranks in records.items():
        for calls in (each["calls"] for each in of_ranks):
            assert len(calls) >= 2, name
            assert all(max(call["rows"]) <= call["targets"] and call["rows"] for call in calls), (name, calls)
            assert all(call["largest"] <= call["targets"] for call in calls), (name, calls)


SIZES = {
    "cpu": {**SMALL, "hidden": 64, "inner": 128, "layers": 4, "head": 16, "length": 512, "microbatch": 6},
    "cuda": {"hidden": 1024, "inner": 2816, "layers": 8, "heads": 16, "head": 64, "length": 4096, "microbatch": 4},
}


@pytest.mark.full
@EVERY_DEVICE
def test_one_process_of_fsdp2_needs_the_memory_of_single(device, tmp_path, figure):
    """With targets at 5% of the positions; logits of all positions would take many times as much."""
    vocabulary = {"cpu": 20_011, "cuda": 128_011}[device]
    sizes = {**SIZES[device], "model_type": "llama", "tied": "true"}
    job = _write_job(tmp_path / "job", sizes, vocabulary=vocabulary, share=0.05)
    peaks = {}
    for name in ("single", "fsdp2"):
        spec = Spec(tmp_path / name)
        spec.folder.mkdir()
        spec.add("sparse", job, [BF16] if device == "cuda" else [], vocabulary=vocabulary)
        (record,) = spec.launch(name, processes=1)["sparse"]
        (targets, positions) = (sum(call[each] for call in record["calls"]) for each in ("targets", "positions"))
        assert 0.03 < targets / positions < 0.07
        assert all(call["rows"] == [call["targets"]] for call in record["calls"])
        peaks[name] = record["peak_bytes"]
        figure(f"peak of {name}, GB", peaks[name] / 1e9)
    logits = 4 * vocabulary * max(call["positions"] for call in record["calls"])
    assert logits > 0.6 * peaks["single"]
    figure("peak of fsdp2 with one process over single's", peaks["fsdp2"] / peaks["single"], at_most=1.15)


def _skip_without(strategy: str) -> None:
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")


def _write_job(folder: Path, sizes: dict[str, Any], *, vocabulary: int, share: float = 0.3) -> Path:
    """Write a job and rows that nearly fill its length, of whose tokens about this share are targets."""
    if not (folder / "job.yaml").exists():
        folder.mkdir()
        chance, num_words = random.Random(1), sizes["length"] * 3 // 4
        rows = []
        for _ in range(24):
            words = chance.choices(WORDS, k=chance.randint(num_words * 3 // 4, num_words))
            cut = max(1, round(share * len(words)))
            rows.append({"prompt": " ".join(words[cut:]), "completion": " ".join(words[:cut])})
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "job.yaml").write_text(JOB.format(**sizes, vocabulary=vocabulary, global_batch=GLOBAL_BATCH))
    return folder / "job.yaml"


def _with_large_vocabulary(name: str, saved: str) -> list[str]:
    quick = ["train.steps=2"]
    if saved:
        values = "hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4"
        config = f"from_config: {{model_type: llama, values: {{{values}, vocab_size: {VOCABULARY}}}}}"
        return [*quick, f"model={{{config}, tokenizer: {{name: {saved}}}}}"]
    values = "model.from_config.values."
    text = f"{values}text_config.vocab_size" if name == "vision_language_sft" else f"{values}vocab_size"
    kernel = [] if name.startswith("distillation") else ["train.loss_kernel=chunked"]
    return [*quick, *kernel, f"{text}={VOCABULARY}", "evaluate={}"]
