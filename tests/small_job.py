"""The small job of the tests: a llama of two layers that is trained to reverse the words of a sentence."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

WORDS = ("red", "green", "blue", "amber", "violet", "white", "black", "grey", "pink", "brown")

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
  validation: {path: held_out.jsonl}
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
checkpoint: {every_steps: 4}
evaluate: {every_steps: 4}
report: {console: plain, log_every_steps: 1}
export: {verify: false}
"""


def write_job(folder: Path, *, text: str = JOB) -> Path:
    """Write the job and its rows: answers of one to eight words, so that batches differ in their number of targets."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(1)
    for name, count in (("train.jsonl", 50), ("held_out.jsonl", 7)):
        write_rows(folder / name, (reversal(chance) for _ in range(count)))
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def write_rows(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def conversation(question: str, answer: str) -> dict[str, object]:
    """Return a row of one question and its answer."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def reversal(chance: random.Random) -> dict[str, object]:
    """Return a row that asks for one to eight words in reverse."""
    words = chance.choices(WORDS, k=chance.randint(1, 8))
    return conversation(f"reverse: {' '.join(words)}", " ".join(reversed(words)))
