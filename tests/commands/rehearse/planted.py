"""A job for a model of 32 layers and an accelerate file for 16 processes, with what rehearses them."""

import json
from pathlib import Path

from transformers import LlamaConfig

from tests.small_models import byte_tokenizer

ROOT = Path(__file__).parents[3]
TEMPLATE = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
REFUSING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}" + TEMPLATE
JOB = """\
run:
  folder: real
model:
  name: ./llama
  lora: {rank: 4, alpha: 8.0, layers: [30, 31]}
data:
  train:
    path: rows.jsonl
  max_length: 64
  over_length: truncate
  batching: {by: packs}
task:
  name: sft
train:
  global_batch_size: 128
  microbatch_size: 4
  epochs: 3
  learning_rate: 1e-3
  schedule: {name: cosine, warmup_steps: 10}
checkpoint:
  every_steps: 500
"""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 2
num_processes: 16
machine_rank: 0
main_process_ip: 10.0.0.1
mixed_precision: 'no'
use_cpu: false
"""


def write_job(folder: Path, *, template: str = TEMPLATE, rows: int = 200, last: str = "") -> Path:
    """Write the job, its rows, its accelerate file and a model folder without weights; return the job's path."""
    texts = [{"prompt": f"What is {n} plus {n % 9}?", "completion": f"It is {n + n % 9}."} for n in range(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in texts) + last)
    (folder / "accelerate.yaml").write_text(ACCELERATE)
    special = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    said = [text for each in texts for text in each.values()]
    saved = byte_tokenizer(said, special=special, pad_token="<pad>", eos_token="<|end|>")
    saved.chat_template = template
    saved.save_pretrained(folder / "llama")
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    LlamaConfig(vocab_size=400, num_key_value_heads=8, eos_token_id=1, pad_token_id=0, **sizes).save_pretrained(
        folder / "llama"
    )
    path = folder / "job.yaml"
    path.write_text(JOB)
    return path


def command(job: Path, *words: str) -> list[str]:
    """Return the words of the command line that rehearses the job on two processes."""
    accelerate = str(job.parent / "accelerate.yaml")
    return ["-m", "finetune", "rehearse", "--config", str(job), "--accelerate", accelerate, *words]
