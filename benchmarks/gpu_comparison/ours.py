"""Ours on a GPU: `train_from_config` on a job file, timed, and otherwise as it is."""

import json
from pathlib import Path

from finetune.config.load import load_config
from finetune.run.train import train_from_config

from comparison.product import observed
from gpu_comparison.by_hand import LEARNING_RATE
from gpu_comparison.cases import LOG_EVERY, Case
from gpu_comparison.documents import write_text, write_tokenizer
from gpu_comparison.shapes import Shape
from gpu_comparison.step_timer import StepTimer
from gpu_comparison.weights import LORA_ALPHA, LORA_RANK, product_on

JOB = """\
run: {{folder: {folder}/run, seed: 1}}
model:
  from_config: {{model_type: {model_type}, values: {values}}}
  tokenizer: {{name: {tokenizer}}}
  dtype: {dtype}{lora}
data:
  train: {{path: {folder}/rows.jsonl}}
  max_length: {length}
  shuffle: false
  cache_folder: {folder}/cache
task: {{name: pretrain}}
train:
  global_batch_size: {rows}
  microbatch_size: {rows}
  steps: {steps}
  learning_rate: {learning_rate}
  schedule: {{name: constant}}
  precision: bf16
checkpoint: {{rehearse: false, resume: never}}
report: {{console: plain, log_every_steps: {log_every}}}
"""


def train(case: Case, shape: Shape, rows: list[list[int]], timer: StepTimer, *, folder: Path) -> None:
    """Train the case's steps."""
    place = folder / case.name.replace(" ", "-").replace(",", "")
    place.mkdir(parents=True, exist_ok=True)
    write_text(place / "rows.jsonl", rows)
    job = _write_job(case, shape, place, tokenizer=write_tokenizer(folder, vocabulary=shape.vocabulary))
    overrides = [f"{key}={json.dumps(value)}" for key, value in case.overrides.items()]
    with (
        product_on(timer.device),
        observed(begin=timer.step, phase=timer.mark, end=lambda record: timer.count(record.num_tokens)),
    ):
        train_from_config(load_config(job, overrides))


def _write_job(case: Case, shape: Shape, place: Path, *, tokenizer: Path) -> Path:
    rows = 1 if case.is_packed else case.rows
    text = JOB.format(
        folder=place.resolve(),
        model_type=shape.model_type,
        values=json.dumps(shape.values()),
        tokenizer=tokenizer.resolve(),
        dtype=case.dtype,
        lora=f"\n  lora: {{rank: {LORA_RANK}, alpha: {LORA_ALPHA}}}" if case.lora else "",
        length=case.length,
        rows=rows,
        steps=case.steps,
        learning_rate=LEARNING_RATE,
        log_every=LOG_EVERY,
    )
    path = place / "job.yaml"
    path.write_text(text)
    return path
