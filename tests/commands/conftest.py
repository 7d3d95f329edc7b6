"""A run's folder with checkpoints in it, written by hand: small, and the same every time."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from finetune.checkpoint.format.layout import step_folder
from finetune.checkpoint.format.manifest import Manifest, RunFingerprint, file_checksum, write_manifest
from finetune.runtime.progress import Progress

Write = Callable[..., Path]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run."""
    folder = tmp_path / "runs" / "first"
    (folder / "checkpoints").mkdir(parents=True)
    return folder


@pytest.fixture
def write(run: Path) -> Write:
    """Write a checkpoint of a step into the run's folder and return its path; words change its manifest."""

    def checkpoint(step: int, **changes: Any) -> Path:
        path = step_folder(run / "checkpoints", step)
        for part in ("model", "optimizer"):
            (path / part).mkdir(parents=True)
        weight = torch.full((3, 4), float(step))
        save_file({"head.weight": weight}, path / "model" / "00000.safetensors")
        save_file({"head.weight/exp_avg": weight}, path / "optimizer" / "00000.safetensors")
        digest = hashlib.sha256(weight.numpy().tobytes()).hexdigest()
        entries = {"head.weight": _entry("parameter"), "head.weight/exp_avg": _entry("exp_avg")}
        _json(path / "index.json", {name: {**entry, "sha256": digest} for name, entry in entries.items()})
        progress = Progress(step, num_tokens=1000 * step, samples_sha256="5a3e")
        _json(path / "progress.json", progress.state_dict())
        _json(path / "scalars.json", {"optimizer": {"head.weight": {"step": float(step)}}, "loss_scale": {}})
        names = [str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()]
        manifest = Manifest(
            step=step,
            run=RunFingerprint({"run.seed": "42"}, {}, {"strategy": "zero3", "processes": "4"}),
            metrics={},
            state_sha256="57a7e",
            created=time.time() - 90,
            versions={"finetune": "0.1.0"},
            files={name: file_checksum(path / name) for name in names},
        )
        write_manifest(path, replace(manifest, **changes))
        return path

    return checkpoint


def _entry(key: str) -> dict[str, Any]:
    part = "model" if key == "parameter" else "optimizer"
    return {"file": f"{part}/00000.safetensors", "name": "head.weight", "key": key, "shape": [3, 4], "dtype": "F32"}


def _json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
