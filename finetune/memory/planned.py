"""Predictions of `finetune plan`, cached for the start of the planned run."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from finetune import __version__
from finetune.config.run_config import RunConfig
from finetune.data.token_cache.cache import cache_folder
from finetune.memory.layout import Layout, method_of
from finetune.runtime.files import atomic
from finetune.runtime.files.read import parse_json, read_regular

_FOLDER = "plans"
_IGNORED_KEYS = ("microbatch_size", "global_batch_size", "steps", "epochs", "tokens", "learning_rate", "schedule")
"""Keys of `train` that do not change the memory of a step, or are in the layout."""


def write_planned(config: RunConfig, predicted: Iterable[tuple[Layout, int]]) -> None:
    """Cache the peaks, in bytes, of the layouts of the unchanged job; a full disk is ignored."""
    own = (method_of(config), config.model.gradient_checkpointing)
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
    """Return the peak, in bytes, that a plan of this job predicted for a rank; None without a prediction."""
    try:
        peaks = parse_json(read_regular(_file(config)))["peak_bytes"]
        peak = peaks.get(_key(strategy, num_ranks, num_shards, microbatch_size, device))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return peak if isinstance(peak, int) else None


def _key(strategy: str, num_ranks: int, num_shards: int, microbatch_size: int, device: str) -> str:
    """Return the key of a peak; only for HSDP the number of shards does not follow from the ranks."""
    shards = f"/{num_shards}" if strategy == "hsdp" else ""
    return f"{strategy}{shards} on {num_ranks} x {device}, {microbatch_size} per microbatch"


def _file(config: RunConfig) -> Path:
    """Return the file of the plans of all jobs with the same memory."""
    train = {key: value for key, value in config.train.model_dump(mode="json").items() if key not in _IGNORED_KEYS}
    data = config.data.model_dump(mode="json", exclude={"cache_folder"})
    parts: Any = [__version__, config.model.model_dump(mode="json"), config.task.model_dump(mode="json"), data, train]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder(config.data) / _FOLDER / f"{digest}.json"
