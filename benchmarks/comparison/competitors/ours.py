"""The product itself: `train_from_config` on a job file, stopped before each step and otherwise as it is."""

from functools import partial
from pathlib import Path
from typing import Any

from comparison.data import load_workload
from comparison.jobs import write_job
from comparison.product import observed, run_folder
from comparison.product import train as train_job
from comparison.worker import Worker


def train(name: str, folder: Path, worker: Worker, *, strategy: str | None) -> None:
    """Train the workload."""
    job = folder / "two-processes.yaml" if strategy else write_job(folder, load_workload(folder), variant=name)
    overrides = [run_folder(folder / "runs" / strategy)] if strategy else []
    with observed(begin=worker.wait, end=partial(_count, worker)):
        train_job(job, overrides)


def _count(worker: Worker, record: Any) -> None:
    worker.count(tokens=record.num_tokens, targets=record.num_targets)
    worker.losses.append(record.losses.sum() / record.num_targets)
