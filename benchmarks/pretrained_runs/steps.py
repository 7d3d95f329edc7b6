"""Both programs train a case, taking steps in turns: their tokens, losses, weights and costs beside each other."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from finetune.report.history import read_events

from comparison.controller import Controller
from comparison.results import Log, Spread
from pretrained_runs.cases import Case, make
from pretrained_runs.smollm2 import MINILM

OURS, THEIRS = "pretrained ours", "pretrained theirs"
WARM_UP = 1  # steps whose cost is not counted
SMALL = 0.01
"""A loss of which the rounding of float32 logits is no longer a small part."""


def measure(case: Case, folder: Path, *, models: Path, data: Path, log: Log) -> dict[str, Any]:
    """Return the record of a case."""
    make(case, folder, models=models, data=data)
    with Controller(folder) as controller:
        controller.start((OURS, THEIRS))
        log(f"{case.name}: {case.title}; {case.steps} steps of {case.batch} rows, ours and {case.theirs}")
        costs = controller.measure(folder, (OURS, THEIRS), rounds=case.steps - 1 - WARM_UP, warm_up=WARM_UP)
    ours, theirs = costs[OURS], costs[THEIRS]
    speed = Spread.of_ratios(theirs.seconds, ours.seconds)
    record = {
        "title": case.title,
        "theirs": case.theirs,
        "batch": case.batch,
        "losses": {"ours": ours.losses, "theirs": theirs.losses},
        "loss_difference": relative_difference(ours.losses, theirs.losses),
        "tokens": Spread.of(ours.tokens).median,
        "seconds": {"ours": Spread.of(ours.seconds).median, "theirs": Spread.of(theirs.seconds).median},
        "speed": str(speed),
        "peak_bytes": {"ours": ours.peak_bytes, "theirs": theirs.peak_bytes},
        "weights": weights_difference(case, folder),
        "rows": rows_compared(folder) if case.task == "sft" else {},
        "figures": figures(folder) if case.model == MINILM else {},
    }
    log(f"  losses within {record['loss_difference']:.1e}, weights {record['weights']}, speed {speed}")
    return record


def relative_difference(ours: list[float], theirs: list[float]) -> float:
    """Return by how much the loss of a step differs at most, relative to it or to SMALL if that is larger."""
    mine, other = np.array(ours), np.array(theirs)
    return float(np.max(np.abs(mine - other) / np.maximum(np.abs(other), SMALL)))


def rows_compared(folder: Path) -> dict[str, int]:
    """Return of how many rows the ids are equal, and the targets but for the last token, which only theirs has."""
    ours, theirs = (json.loads((folder / f"{name}.json").read_text()) for name in ("ours", "theirs"))
    pairs = list(zip(ours, theirs, strict=True))
    same = [mine[1][:-1] == other[1][:-1] and (mine[1][-1], other[1][-1]) == (0, 1) for mine, other in pairs]
    ids = sum(mine[0] == other[0] for mine, other in pairs)
    return {"all": len(pairs), "equal ids": ids, "equal targets but for the newline": sum(same)}


def figures(folder: Path) -> dict[str, dict[str, float]]:
    """Return what both programs' own evaluations say of the held-out rows after training, by figure."""
    theirs = json.loads((folder / "figures.json").read_text())
    events = read_events(folder / "runs" / "ours" / "events.jsonl")
    ours = [event["metrics"] for event in events if event["event"] == "Evaluated"][-1]
    return {name: {"ours": ours[name], "theirs": theirs[name]} for name in theirs}


def weights_difference(case: Case, folder: Path) -> dict[str, float]:
    """Return by how much the trained weights differ: any matrix relative to itself, all relative to their change.

    A bias may be small and have a gradient of zero, as that of the keys has: rounding alone moves it.
    """
    base = load_file(Path((folder / "model.path").read_text()) / "model.safetensors")
    ours, theirs = (_updates(case, folder / "runs" / name, base=base) for name in ("ours/final", "theirs"))
    shared = ours.keys() & theirs.keys()
    assert shared, (sorted(ours)[:3], sorted(theirs)[:3])
    apart = {name: float((ours[name] - theirs[name]).norm()) for name in shared}
    merged = max(apart[name] / float((base[name] + theirs[name]).norm()) for name in shared if base[name].dim() > 1)
    changed = sum(float(theirs[name].norm()) ** 2 for name in shared)
    return {"merged": merged, "update": (sum(each**2 for each in apart.values()) / changed) ** 0.5}


def _updates(case: Case, folder: Path, *, base: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what training has added to each weight of the base."""
    if not case.has_lora:
        trained = load_file(folder / "model.safetensors")
        return {name: trained[name].float() - base[name].float() for name in trained.keys() & base.keys()}
    adapter = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    scale, updates = config["lora_alpha"] / config["r"], {}
    for name in adapter:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            product = adapter[f"{module}.lora_B.weight"].float() @ adapter[name].float()
            updates[f"{module.removeprefix('base_model.model.')}.weight"] = scale * product
    return updates
