"""What earlier runs of the job say: how much longer or shorter a step took than the cost model says."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from finetune.report.jsonl import read_events
from finetune.runtime.files.read import read_json
from finetune.runtime.gpus.specifications import GpuKind, find_gpu

WARM_UP_STEPS = 3
_MIN_STEPS = 5


@dataclass(frozen=True)
class MeasuredRun:
    """Steps of this job that were taken on GPUs of one kind."""

    kind: GpuKind
    num_gpus: int
    strategy: str
    tokens_per_second: float
    num_steps: int


def read_measured_run(folder: Path, *, gpu_table: Path | None = None) -> MeasuredRun | None:
    """Return what the run in the folder has measured; None without one, without a known GPU, or after few steps."""
    try:
        events = read_events(folder / "events.jsonl")
        environment = read_json(folder / "environment.json")
        device = environment["devices"][0]
        world = int(environment["launcher"].get("WORLD_SIZE", "1"))
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    kind = find_gpu(str(device.get("name", "")), table=gpu_table) if device.get("type") == "cuda" else None
    started = [event for event in events if event["event"] == "RunStarted"]
    rates = _rates([event for event in events if event["event"] == "StepTaken"])
    if kind is None or not started or len(rates) < _MIN_STEPS:
        return None
    name = str(started[-1].get("strategy", "")).partition(" ")[0]  # `fsdp2 on 8 processes splits ...`
    return MeasuredRun(kind, world, name, median(rates), len(rates))


def _rates(steps: Sequence[dict[str, Any]]) -> list[float]:
    """Return the tokens per second of computing, of each step but the first few."""
    seconds = [(event, event["seconds"] - event["data_seconds"]) for event in steps[WARM_UP_STEPS:]]
    return [event["num_tokens"] / computed for event, computed in seconds if computed > 0]
