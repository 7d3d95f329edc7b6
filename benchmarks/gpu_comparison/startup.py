"""From the start of a process to the end of its first step: LoRA on a model whose files lie on this machine.

Ours is `python -m finetune` on a job file; Trainer's is the script `startup_trainer.py`. Both read the same documents,
tokenize them and load the same files; both are ended when the first step is over.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gpu_comparison import weight_files
from gpu_comparison.by_hand import LEARNING_RATE
from gpu_comparison.cases import Case
from gpu_comparison.documents import documents, write_text
from gpu_comparison.shapes import Shape
from gpu_comparison.weights import LORA_ALPHA, LORA_RANK

NUM_DOCUMENTS = 32
POLL_SECONDS = 0.02
JOB = """\
run: {{folder: {run}, seed: 1}}
model: {{name: {model}, dtype: bfloat16, lora: {{rank: {rank}, alpha: {alpha}}}}}
data:
  train: {{path: {rows}, format: text}}
  max_length: {length}
  over_length: truncate
  cache_folder: {cache}
task: {{name: pretrain}}
train:
  global_batch_size: 1
  microbatch_size: 1
  steps: 2
  learning_rate: {learning_rate}
  schedule: {{name: constant}}
  precision: bf16
checkpoint: {{rehearse: false, resume: never}}
report: {{console: plain, log_every_steps: 1}}
"""


def measure(case: Case, shape: Shape, folder: Path, *, device: torch.device) -> dict[str, Any]:
    """Return the seconds of the start, and its phases."""
    if not weight_files.is_written(folder, shape):
        raise FileNotFoundError("the model's files were not written")
    place = folder / case.name.replace(" ", "-").replace(",", "")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    rows = place / "rows.jsonl"
    write_text(rows, documents(NUM_DOCUMENTS, length=case.length, varies=False, vocabulary=shape.vocabulary))
    model = weight_files.place(folder, shape)
    start = _ours if case.competitor == "ours" else _trainer
    return start(place, model, rows, length=case.length, device=device)


def _ours(place: Path, model: Path, rows: Path, *, length: int, device: torch.device) -> dict[str, Any]:
    job, run = place / "job.yaml", place / "run"
    text = JOB.format(
        **{"run": run, "model": model, "rows": rows, "length": length, "cache": place / "cache"},
        **{"learning_rate": LEARNING_RATE, "rank": LORA_RANK, "alpha": LORA_ALPHA},
    )
    job.write_text(text)
    command = [sys.executable, "-m", "finetune", "--config", str(job)]
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=place, env=_variables(device), stdout=2)
    try:
        event = _wait_for_first_step(run / "events.jsonl", process)
        seconds = time.monotonic() - started
    finally:
        process.kill()
        process.wait()
    return {"start_seconds": seconds, "start_phases": event["seconds"]}


def _wait_for_first_step(events: Path, process: "subprocess.Popen[bytes]") -> Mapping[str, Any]:
    while True:
        has_ended = process.poll() is not None
        for line in events.read_text().splitlines() if events.exists() else ():
            if '"StartedUp"' in line:
                event: Mapping[str, Any] = json.loads(line)
                return event
        if has_ended:
            raise ChildProcessError(f"it ended with exit code {process.returncode} before its first step was over")
        time.sleep(POLL_SECONDS)


def _trainer(place: Path, model: Path, rows: Path, *, length: int, device: torch.device) -> dict[str, Any]:
    script = Path(__file__).parent / "startup_trainer.py"
    command = [sys.executable, str(script), str(model), str(rows), str(length), str(place / "trainer"), device.type]
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=place, env=_variables(device), stdout=subprocess.PIPE, text=True)
    marks = {}
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("mark "):
                marks[line.split()[1]] = time.monotonic() - started
            if line.startswith("mark first_step"):
                break
    finally:
        process.kill()
        process.wait()
    if "first_step" not in marks:
        raise ChildProcessError(f"it ended with exit code {process.returncode} before its first step was over")
    return {"start_seconds": marks["first_step"], "start_phases": marks}


def _variables(device: torch.device) -> dict[str, str]:
    """Return the environment; our bytecode is kept, as that of the peers, which came with their installation."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, **({"CUDA_VISIBLE_DEVICES": ""} if device.type == "cpu" else {})}
