"""Ours on a GPU: `train_from_config` on a job file, timed, and otherwise as it is."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from finetune.config.load import load_config
from finetune.model.loading import load
from finetune.run.train import train_from_config
from finetune.runtime.parameters import InitContext
from finetune.runtime.processes import free_loopback_port
from finetune.strategy.choose import DataParallel, FullySharded, ZeroRedundancy

from comparison.competitors import launch
from comparison.product import observed
from gpu_comparison.cases import LOG_EVERY, STEPS, Case
from gpu_comparison.documents import write_text, write_tokenizer
from gpu_comparison.shapes import Shape
from gpu_comparison.step_timer import StepTimer
from gpu_comparison.weights import LEARNING_RATE, LORA_ALPHA, created_on, draw

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
    write_text(folder / "rows.jsonl", rows)
    job = _write_job(case, shape, folder)
    settings = {**case.workload.job, **case.variant.settings}
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items() if value is not None]
    with (
        _one_rank(case.variant.strategy) if case.variant.strategy else nullcontext(),
        _built_on(timer.device),
        observed(begin=timer.step, phase=timer.mark, end=lambda record: timer.count(record.num_tokens)),
    ):
        train_from_config(load_config(job, overrides))


@contextmanager
def _one_rank(strategy: str) -> Iterator[None]:
    """Set what `accelerate launch` would for one process under the strategy."""
    os.chdir(launch.ROOT)  # a config of DeepSpeed is named relative to it
    os.environ |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_loopback_port())}
    with launch.environment_of(strategy):
        yield


@contextmanager
def _built_on(device: torch.device) -> Iterator[None]:
    """Have the model built on the device, with weights drawn there, under every strategy."""

    def on_device(build_context: Callable[..., InitContext]) -> Callable[..., InitContext]:
        def init_context(strategy: Any, given: torch.device) -> InitContext:
            return InitContext(context=lambda: created_on(device), gather=build_context(strategy, given).gather)

        return init_context

    with (
        patch.object(DataParallel, "init_context", on_device(DataParallel.init_context)),
        patch.object(FullySharded, "init_context", on_device(FullySharded.init_context)),
        patch.object(ZeroRedundancy, "init_context", on_device(ZeroRedundancy.init_context)),
        patch.object(load, "initialize_weights", lambda model, *, gather, **_: draw(model, gather)),
    ):
        yield


def _write_job(case: Case, shape: Shape, folder: Path) -> Path:
    workload = case.workload
    lora = {"rank": workload.lora_rank, "alpha": LORA_ALPHA, "target_modules": workload.lora_targets}
    path = folder / "job.yaml"
    text = JOB.format(
        folder=folder,
        model_type=shape.model_type,
        values=json.dumps(shape.values()),
        tokenizer=write_tokenizer(folder, vocabulary=shape.vocabulary),
        dtype=workload.dtype,
        lora=f"\n  lora: {json.dumps(lora)}" if workload.lora_rank else "",
        length=workload.length,
        rows=1 if case.variant.is_packed else workload.rows,
        steps=STEPS,
        learning_rate=LEARNING_RATE,
        log_every=LOG_EVERY,
    )
    path.write_text(text)
    return path
