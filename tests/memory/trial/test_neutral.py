"""A run whose longest batch was tried is bitwise the run in which it was not."""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from finetune.report.history import read_events
from tests import launching

pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.timeout(900)]

JOB = """
run: {folder: runs/job, seed: 7}
model:
  from_config:
    model_type: llama
    values:
      {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
       tie_word_embeddings: true, max_position_embeddings: 128}
  tokenizer: {train: {vocabulary_size: 320}}
data:
  train: {path: train.jsonl}
  max_length: 128
  chat_template: chatml
  cache_folder: cache
  batching: {padding_free: false}
task: {name: sft}
train: {global_batch_size: 12, microbatch_size: 2, steps: 4, learning_rate: 1e-2, embedding_noise: 5.0}
checkpoint: {every_steps: 2}
report: {console: plain, log_every_steps: 1}
export: {verify: false}
"""
VARIANTS = {
    "full": [],
    "lora": ["model.lora={rank: 4, alpha: 8.0, dropout: 0.3}"],
    "one microbatch": ["train.microbatch_size=4"],
}
PROCESSES = {"single": 1, "ddp": 3, "fsdp2": 3, "zero2": 3, "zero3": 3}
WORDS = ["red", "green", "blue", "amber", "violet", "white", "black", "grey", "pink", "brown"]


@dataclass(frozen=True)
class Left:
    folder: Path

    @property
    def error(self) -> str | None:
        path = self.folder / "error.txt"
        return path.read_text() if path.exists() else None

    @property
    def steps(self) -> list[tuple[float, float, str]]:
        events = [each for each in read_events(self.folder / "events.jsonl") if each["event"] == "StepTaken"]
        return [(each["loss"], each["gradient_norm"], each["samples_sha256"]) for each in events]

    @property
    def digests(self) -> dict[str, object]:
        """Those of weights, optimizer state and random states in the last checkpoint."""
        found = sorted((self.folder / "checkpoints").glob("step-*"))[-1] / "manifest.json"
        files = json.loads(found.read_text())["files"]
        return {name: facts for name, facts in files.items() if name.split("/")[0] in ("model", "optimizer", "rng")}

    @property
    def output(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.parent.parent.glob("*.log"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("neutral")
    chance = random.Random(3)
    rows = [chance.choices(WORDS, k=chance.choice((2, 3, 5, 20))) for _ in range(60)]
    turns = [[{"role": "user", "content": " ".join(row)}, {"role": "assistant", "content": row[0]}] for row in rows]
    (place / "train.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    (place / "job.yaml").write_text(JOB)
    return place


def launch(folder: Path, strategy: str, jobs: dict[str, list[str]]) -> dict[str, Left]:
    """Run the jobs in one launch, by name with their overrides."""
    left = {name: Left(folder / "runs" / f"{strategy}-{name}".replace(" ", "-")) for name in jobs}
    spec = [
        {"job": str(folder / "job.yaml"), "overrides": [f"run.folder={left[name].folder}", *overrides]}
        for name, overrides in jobs.items()
    ]
    path, log = folder / f"{strategy}.json", folder / f"{strategy}.log"
    path.write_text(json.dumps(spec))
    words = ["-m", "tests.task_cases.worker", str(path)]
    alone = [sys.executable, *words]
    processes = PROCESSES[strategy]
    command = alone if processes == 1 else launching.accelerate_command(strategy, *words, processes=processes)
    code = launching.run(command, log=log, timeout_seconds=600)
    assert code == 0, log.read_text(errors="replace")[-6000:]
    return left


@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("single", "zero2", "zero3"))]
)
def test_a_tried_batch_changes_nothing(folder, strategy):
    jobs = {
        f"{variant}-{tries}": [*overrides, f"train.try_longest_batch={tries}"]
        for variant, overrides in VARIANTS.items()
        for tries in ("never", "always")
    }
    resumed = [*VARIANTS["lora"], "train.try_longest_batch=always", f"run.folder={folder / 'runs' / f'{strategy}-cut'}"]
    jobs |= {"first half": [*resumed, "train.stop_after_steps=2"], "second half": resumed}
    left = launch(folder, strategy, jobs)
    cut = Left(folder / "runs" / f"{strategy}-cut")
    log = (folder / f"{strategy}.log").read_text()
    assert log.count("longest batch: ") == len(VARIANTS) + 2
    assert "the longest of 5" in log or "the longest of 4" in log
    for variant in VARIANTS:
        without, tried = left[f"{variant}-never"], left[f"{variant}-always"]
        assert (without.error, tried.error) == (None, None)
        assert len(tried.steps) == 4
        assert tried.steps == without.steps
        assert tried.digests
        assert tried.digests == without.digests
    assert cut.digests == left["lora-never"].digests
