"""Resumes by the product and by `accelerate.load_state`, of the same state into the same model."""

import time
from pathlib import Path
from typing import Any

from save_worker import build

from finetune.checkpoint.checkpointer import Checkpointer
from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.checkpoint.read.checksum_prefetch import ChecksumPrefetch
from finetune.checkpoint.sharding.access import build_access
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.run.build.prepared_model import PreparedModel

Figures = dict[str, Any]


def ours(job: Path, folder: Path, ahead: ChecksumPrefetch | None) -> Figures:
    """Return how long it takes to find, verify and load the newest checkpoint, once the model is there."""
    machine = build(job)
    checkpoints = checkpointer(machine, folder, ahead)
    started, cpu = time.perf_counter(), time.process_time()
    found = checkpoints.find()
    verified = time.perf_counter()
    assert found is not None, "it has been saved before"
    checkpoints.load(found)
    ended = time.perf_counter()
    return {
        "way": "ours",
        "seconds": ended - started,
        "of_them_finding": verified - started,
        "cpu_seconds": time.process_time() - cpu,
        "digest": _digest(machine),
    }


def accelerate(job: Path, folder: Path) -> Figures:
    """Return how long `load_state` takes, which verifies nothing."""
    machine = build(job)
    started, cpu = time.perf_counter(), time.process_time()
    machine.accelerator.load_state(str(folder / "accelerate"))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    return {"way": "accelerate", "seconds": seconds, "cpu_seconds": cpu_seconds, "digest": _digest(machine)}


def checkpointer(machine: PreparedModel, folder: Path, ahead: ChecksumPrefetch | None = None) -> Checkpointer:
    """Return the checkpoints of a run that keeps them in the folder."""
    access = build_access(machine.accelerator, machine.model, machine.optimizer)
    return Checkpointer(
        folder / "checkpoints",
        section=CheckpointSection(),
        access=access,
        run=RunFingerprint({}, {}, {}),
        log=lambda _: None,
        checksums=ahead,
    )


def _digest(machine: PreparedModel) -> float:
    """Return a number that differs where what was loaded differs."""
    inner = getattr(machine.optimizer, "optimizer", machine.optimizer)
    total = 0.0
    for parameter in machine.model.parameters():
        for tensor in (parameter.detach(), *(each for each in inner.state[parameter].values())):
            total += float(tensor.double().abs().sum())
    return total
