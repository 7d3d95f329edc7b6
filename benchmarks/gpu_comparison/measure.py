"""The measurement of a case, and of the machine; both run in a process of their own."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from finetune.runtime.gpus import find_gpu

from comparison import report
from gpu_comparison.cases import STEPS, Case
from gpu_comparison.documents import describe, documents, mean_length
from gpu_comparison.processes import Finish
from gpu_comparison.shapes import SHAPES
from gpu_comparison.step_timer import StepTimer

MODULES = {"ours": "ours", "bare": "by_hand", "trainer": "peers", "trl": "peers"}


@dataclass(frozen=True)
class Settings:
    """The device, the folder for whatever a case writes, and whether its model and documents are tiny."""

    device: str
    folder: Path
    is_tiny: bool


def import_competitors() -> None:
    """Import all that the cases need; forked processes have it."""
    for module in MODULES.values():
        import_module(f"gpu_comparison.{module}")


def measure(case: Case, settings: Settings, finish: Finish) -> None:
    """Train the case's steps and hand their record over; raises MemoryError on a GPU that is too small."""
    device, shape = torch.device(settings.device), SHAPES[case.workload.shape]
    if settings.is_tiny:
        shape, case = shape.tiny(), case.shortened()
    if device.type == "cuda" and torch.cuda.get_device_properties(0).total_memory < case.least_gib * 2**30:
        raise MemoryError(f"the case needs {case.least_gib:.0f} GiB of GPU memory")
    workload, variant = case.workload, case.variant
    count = workload.rows * STEPS * (2 if variant.is_packed else 1)  # a pack holds about as many as there are rows
    rows = documents(count, length=workload.length, varies=workload.varies, vocabulary=shape.vocabulary)
    timer = StepTimer(device, finish)
    timer.facts |= {
        "lengths": describe(rows),
        "weight_flops": shape.weight_flops(is_lora=bool(workload.lora_rank)),
        "attention_flops": shape.attention_flops(mean_length(rows)),
    }
    folder = settings.folder / case.name.replace(" ", "-").replace(",", "")
    folder.mkdir(parents=True, exist_ok=True)
    import_module(f"gpu_comparison.{MODULES[variant.competitor]}").train(case, shape, rows, timer, folder=folder)


def describe_machine(device: str, finish: Finish) -> None:
    """Hand over processor, versions, commit and the dense bf16 peak (None for a GPU that is not in our table)."""
    facts: dict[str, Any] = {**report.machine(), "peak_flops": None}
    if device == "cuda":
        name = torch.cuda.get_device_name(0)
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        facts |= {"processor": f"{name}, {memory:.0f} GiB", "cuda": torch.version.cuda}
        if (gpu := find_gpu(name)) is not None:
            facts["peak_flops"] = gpu.peak_flops("bf16")
    finish(facts)
