"""The run that faults befall: a small job on generated rows, and the command that launches it at a place."""

import sys
from pathlib import Path

from tests import launching, small_job
from tests.faults.schedule import EVALUATE_EVERY, SAVE_EVERY, STEPS, Chain, Place

GLOBAL_BATCH = 12
MICROBATCHES = {1: 6, 2: 3, 3: 2, 4: 3}
"""By the number of ranks; on one, two and three of them two microbatches are accumulated."""

HANG_SECONDS, SHUTDOWN_SECONDS = 12, 6
"""Without progress; and until the launcher kills ranks that do not end, as a stopped one never does."""

JOB = f"""
run: {{folder: run, seed: 7, hang_after_seconds: {HANG_SECONDS}}}
model:
  from_config:
    model_type: llama
    values:
      {{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
       tie_word_embeddings: true}}
  tokenizer: {{train: {{vocabulary_size: 320}}}}
data:
  train: {{path: train.jsonl}}
  validation: {{path: held_out.jsonl}}
  max_length: 128
  chat_template: chatml
  cache_folder: cache
task: {{name: sft}}
train:
  global_batch_size: {GLOBAL_BATCH}
  steps: {STEPS}
  learning_rate: 3e-3
  schedule: {{name: cosine, warmup_steps: 2}}
checkpoint: {{every_steps: {SAVE_EVERY}, keep_last: 3}}
evaluate: {{every_steps: {EVALUATE_EVERY}}}
report: {{console: plain, log_every_steps: 10}}
export: {{verify: false}}
"""

ADAPTER = "model.lora={rank: 4, alpha: 8.0, dropout: 0.1}"


def write_job(folder: Path) -> Path:
    """Write job and rows into the folder; return the job's path."""
    return small_job.write_job(folder, text=JOB)


def overrides(chain: Chain, place: Place) -> list[str]:
    """Return what the chain changes in the job; the place changes the microbatch alone."""
    found = [
        f"train.microbatch_size={MICROBATCHES[place.ranks]}",
        f"checkpoint.asynchronous={_yes(chain.asynchronous)}",
    ]
    if chain.adapter:
        found.append(ADAPTER)
    if chain.workers:
        found.append(f"data.num_workers={chain.workers}")
    return found


def launch_command(job: Path, place: Place, changes: list[str]) -> list[str]:
    """Return the command of an attempt, run in the folder of the checkout."""
    words = ["-m", "finetune", "--config", str(job)]
    for change in (f"run.folder={job.parent / 'run'}", f"data.cache_folder={job.parent / 'cache'}", *changes):
        words += ["--set", change]
    if place.strategy == "single":
        return [sys.executable, *words]
    return launching.accelerate_command(place.strategy, *words, processes=place.ranks)


def _yes(value: bool) -> str:
    return "true" if value else "false"
