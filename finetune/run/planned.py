"""Predictions that `finetune plan` made, kept in the cache for the start of the run that was planned."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from finetune import __version__
from finetune.config.run_config import RunConfig
from finetune.config.sections.model import ModelSection
from finetune.data.token_cache.cache import cache_folder
from finetune.run.symbolic.prediction import Layout, Method
from finetune.runtime.files import atomic
from finetune.runtime.files.read import parse_json, read_regular

_FOLDER = "plans"
_UNIMPORTANT = ("microbatch_size", "global_batch_size", "steps", "epochs", "tokens", "learning_rate", "schedule")
"""Keys of `train` that decide nothing, or are in the layout."""


def method_of(model: ModelSection) -> Method:
    """Return how a job trains: all weights, or adapters on a frozen base, which may be quantized."""
    if model.quantization is not None:
        return "qlora"
    adapters = (model.lora, model.ia3, model.oft, model.prompt_tuning, model.prefix_tuning, model.adapter)
    return "lora" if any(each is not None for each in adapters) else "full"


def write_planned(config: RunConfig, predicted: Iterable[tuple[Layout, int]]) -> None:
    """Keep the peaks, in bytes, of the layouts in which the job as it is written may run; without room, nothing."""
    own = (method_of(config.model), config.model.gradient_checkpointing)
    peaks = {
        _key(
            layout.strategy,
            layout.num_ranks,
            min(layout.num_ranks, layout.ranks_per_node),
            layout.microbatch_size,
            layout.device,
        ): peak
        for layout, peak in predicted
        if (layout.method, layout.gradient_checkpointing) == own
    }
    with suppress(OSError):
        atomic.write_json(_file(config), {"peak_bytes": peaks}, exact=True)


def read_planned(
    config: RunConfig, *, strategy: str, num_ranks: int, num_shards: int, microbatch_size: int, device: str
) -> int | None:
    """Return the peak, in bytes, that a plan of this job predicted for a rank; None where it predicted none."""
    try:
        peaks = parse_json(read_regular(_file(config)))["peak_bytes"]
        peak = peaks.get(_key(strategy, num_ranks, num_shards, microbatch_size, device))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return peak if isinstance(peak, int) else None


def _key(strategy: str, num_ranks: int, num_shards: int, microbatch_size: int, device: str) -> str:
    """Return what a peak is filed under; only HSDP has a number of shards that does not follow from the ranks."""
    shards = f"/{num_shards}" if strategy == "hsdp" else ""
    return f"{strategy}{shards} on {num_ranks} x {device}, {microbatch_size} per microbatch"


def _file(config: RunConfig) -> Path:
    """Return the file of all plans of jobs that take the same memory."""
    train = {key: value for key, value in config.train.model_dump(mode="json").items() if key not in _UNIMPORTANT}
    data = config.data.model_dump(mode="json", exclude={"cache_folder"})
    parts: Any = [__version__, config.model.model_dump(mode="json"), config.task.model_dump(mode="json"), data, train]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder(config.data) / _FOLDER / f"{digest}.json"
