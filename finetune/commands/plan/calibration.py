"""The pace of an earlier run of the job, by which the cost model is corrected."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from finetune.report.history import read_history
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
    """Return the pace of the run in the folder; None without a run, with an unknown GPU, or after few steps."""
    try:
        history = read_history(folder)
        environment = read_json(folder / "environment.json")
        device = environment["devices"][0]
        world = int(environment["launcher"].get("WORLD_SIZE", "1"))
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    kind = find_gpu(str(device.get("name", "")), table=gpu_table) if device.get("type") == "cuda" else None
    rates = history.steps.compute_rates(num_warm_up=WARM_UP_STEPS)
    if kind is None or not history.starts or len(rates) < _MIN_STEPS:
        return None
    name = str(history.starts[-1].get("strategy", "")).partition(" ")[0]  # `fsdp2 on 8 processes splits ...`
    return MeasuredRun(kind, world, name, median(rates.tolist()), len(rates))
