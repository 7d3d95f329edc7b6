"""A job small enough that starting it takes longer than running it, on rows made here."""

import json
import random
from pathlib import Path

WORDS = ["red", "green", "blue", "amber", "violet", "white", "black", "grey", "pink", "brown"]
LORA = "model.lora={rank: 4, alpha: 8, dropout: %s}"

JOB = """
run: {folder: runs/job, seed: 7}
model:
  from_config:
    model_type: llama
    values:
      {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
       tie_word_embeddings: true}
  tokenizer: {train: {vocabulary_size: 320}}
data:
  train: {path: train.jsonl}
  max_length: 128
  chat_template: chatml
  cache_folder: cache
task: {name: sft}
train:
  global_batch_size: 8
  microbatch_size: 4
  steps: 8
  learning_rate: 1e-2
  schedule: {name: cosine, warmup_steps: 2}
report: {console: plain}
"""


def write_job(folder: Path, *, num_rows: int = 22) -> Path:
    """Write job and rows and return the job's path; the answers' lengths differ, so every batch counts otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(1)
    rows = [json.dumps(_row(chance.choices(WORDS, k=chance.randint(1, 8)))) for _ in range(num_rows)]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "job.yaml").write_text(JOB)
    return folder / "job.yaml"


def _row(words: list[str]) -> dict[str, list[dict[str, str]]]:
    return {
        "messages": [
            {"role": "user", "content": f"reverse: {' '.join(words)}"},
            {"role": "assistant", "content": " ".join(reversed(words))},
        ]
    }
