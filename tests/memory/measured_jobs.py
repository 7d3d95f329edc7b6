"""Jobs whose peak memory is predicted and measured: live bytes in real processes on CPUs over gloo."""

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tests.launching import accelerate_command, capture

STRATEGIES = ("single", "ddp", "fsdp2", "zero2", "zero3")
METHODS = {"full": (), "lora": ("model.lora={rank: 8, alpha: 16}",)}
LLAMA = "tie_word_embeddings: false, num_attention_heads: 8, num_key_value_heads: 4"
SIZES = {
    "small": f"{{hidden_size: 256, intermediate_size: 704, num_hidden_layers: 6, vocab_size: 2048, {LLAMA}}}",
    "medium": f"{{hidden_size: 512, intermediate_size: 1408, num_hidden_layers: 8, vocab_size: 8192, {LLAMA}}}",
}
LENGTH, MICROBATCH = 256, 2

JOB = """
run: {{folder: {folder}/run, seed: 7}}
model:
  from_config: {{model_type: llama, values: {values}}}
  tokenizer: {{train: {{vocabulary_size: 300}}}}
data:
  train: {{path: {folder}/rows.jsonl}}
  max_length: {length}
  over_length: truncate
  cache_folder: {folder}/cache
task: {{name: pretrain}}
train: {{global_batch_size: {batch}, microbatch_size: {microbatch}, steps: 3, learning_rate: 1.0e-3}}
checkpoint: {{every_steps: null}}
report: {{console: plain}}
export: {{verify: false}}
"""


@dataclass(frozen=True)
class Combination:
    """A job under a strategy: two ranks, one under `single`."""

    size: str
    strategy: str
    method: str
    recomputes: bool

    @property
    def name(self) -> str:
        return "/".join([self.size, self.strategy, self.method, *(["recomputed"] if self.recomputes else [])])

    @property
    def num_ranks(self) -> int:
        return 1 if self.strategy == "single" else 2

    @property
    def overrides(self) -> tuple[str, ...]:
        return (*METHODS[self.method], f"model.gradient_checkpointing={str(self.recomputes).lower()}")


COMBINATIONS = {
    each.name: each
    for each in (
        Combination(size, strategy, method, recomputes=(size == "medium") == (method == "full"))
        for size, strategy, method in product(SIZES, STRATEGIES, METHODS)
    )
}


def write_job(combination: Combination, folder: Path) -> Path:
    """Write a job whose rows all have the maximum length, and return its path."""
    folder.mkdir(parents=True)
    text = "the quick brown fox jumps over the lazy dog " * LENGTH
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n in range(8)))
    values, batch = SIZES[combination.size], combination.num_ranks * MICROBATCH
    job = JOB.format(folder=folder, values=values, length=LENGTH, batch=batch, microbatch=MICROBATCH)
    path = folder / "job.yaml"
    path.write_text(job)
    return path


def measure_peak(combination: Combination, job: Path) -> int:
    """Return the peak bytes of the second and third step, of the rank that holds most."""
    words = [word for setting in combination.overrides for word in ("--set", setting)]
    program = ("-m", "tests.memory.live_program", str(job.parent), "--config", str(job), *words)
    command = accelerate_command(combination.strategy, *program, processes=combination.num_ranks)
    done = capture(command, timeout_seconds=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    peaks = [json.loads((job.parent / f"{rank}.json").read_text()) for rank in range(combination.num_ranks)]
    return max(peak for of_rank in peaks for peak in of_rank[1:])
