"""Ours on a GPU: `train_from_config` on a job file, watched, and otherwise as it is."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from finetune.config.load import load_config
from finetune.run.training import train_from_config
from finetune.train import loop, step

from contest.on_gpu.cases import LOG_EVERY, Case
from contest.on_gpu.plain import LEARNING_RATE
from contest.on_gpu.rows import write_text, write_tokenizer
from contest.on_gpu.shapes import Shape
from contest.on_gpu.watch import Watch
from contest.on_gpu.weights import LORA_ALPHA, LORA_RANK, product_on

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


def play(case: Case, shape: Shape, rows: list[list[int]], watch: Watch, *, folder: Path) -> None:
    """Train the case's steps."""
    place = folder / case.name.replace(" ", "-").replace(",", "")
    place.mkdir(parents=True, exist_ok=True)
    write_text(place / "rows.jsonl", rows)
    job = _write_job(case, shape, place, tokenizer=write_tokenizer(folder, vocabulary=shape.vocabulary))
    overrides = [f"{key}={json.dumps(value)}" for key, value in case.overrides.items()]
    with product_on(watch.device), watched(watch):
        train_from_config(load_config(job, overrides))


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Have every step tell where it begins, where its phases end and what it learns."""
    of_loop, of_step, take_step = loop.reach, step.reach, loop.take_step
    phases = {"forward": "forward", "backward": "backward", "update.after": "update"}

    def beginning(point: str, **where: Any) -> bool:
        if point == "data":
            watch.step()
        return of_loop(point, **where)

    def passing(point: str, **where: Any) -> bool:
        if point in phases:
            watch.mark(phases[point])
        return of_step(point, **where)

    def noting(parts: Any, group: Any, counts: Any, **named: Any) -> Any:
        watch.note(counts.num_tokens)
        return take_step(parts, group, counts, **named)

    with (
        patch.object(loop, "reach", beginning),
        patch.object(step, "reach", passing),
        patch.object(loop, "take_step", noting),
    ):
        yield


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
