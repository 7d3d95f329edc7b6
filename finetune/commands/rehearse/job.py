"""Overrides of the job file for a few steps on a CPU, each with the reason."""

import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from finetune.commands.rehearse.report import Change
from finetune.commands.rehearse.widths import Sizes
from finetune.config.paths import is_url
from finetune.config.rules.unused_keys import unused_keys
from finetune.config.run_config import RunConfig, smallest_microbatch_size
from finetune.registry.losses import LOSS_KERNELS
from finetune.registry.optimizers import OPTIMIZERS
from finetune.registry.tasks import TASKS

MAX_MICROBATCH, MAX_ACCUMULATION = 2, 2
MIN_FRACTION = 0.1
_INITIALIZED_FROM_WEIGHTS = ("pissa", "olora", "loftq")

_FEW_STEPS = "a few steps"
_GPU_ONLY = "not available on a CPU"
_SMALL = "to fit a CPU"
_FP16 = "a CPU does not train in fp16"
_OUTSIDE = "the rehearsal changes nothing outside its folder"
_SAMPLE = "the chosen rows are not representative"

_FIXED: Mapping[str, tuple[Any, str]] = {
    "run.local_folder": (None, _OUTSIDE),
    "run.spot_notice": (None, "this machine has no spot notices"),
    "run.on_end": (None, _OUTSIDE),
    "report.trackers": ([], _OUTSIDE),
    **{f"report.{key}": (None, _OUTSIDE) for key in ("project", "run_name", "entity", "group")},
    "report.tags": ([], _OUTSIDE),
    "report.log_every_steps": (1, _FEW_STEPS),
    "report.console": ("plain", "its output is a log"),
    "export.push_to_hub": (None, _OUTSIDE),
    "export.private": (True, _OUTSIDE),
    "export.verify": (True, "the export is verified here"),
    "train.epochs": (None, _FEW_STEPS),
    "train.tokens": (None, _FEW_STEPS),
    "train.stop_after_steps": (None, _FEW_STEPS),
    "train.time_limit_minutes": (None, "the rehearsal has its own"),
    "train.tf32": ("auto", _GPU_ONLY),
    "checkpoint.keep_every_steps": (None, _FEW_STEPS),
    "data.audit.max_truncated_rows": (None, _SAMPLE),
    "data.audit.max_dropped_rows": (None, _SAMPLE),
    "data.audit.max_lost_targets": (None, _SAMPLE),
    "data.audit.max_duplicate_samples": (None, _SAMPLE),
    "data.audit.max_unknown_tokens": (None, _SAMPLE),
    "data.prepare_workers": (0, "few rows"),
    "model.compile": ("off", "compiling takes longer than the rehearsal"),
    "model.activation_offload": (False, _GPU_ONLY),
}
"""Keys that have the same value in every rehearsal, with the reason."""

_LIMITS: Mapping[str, tuple[int, str]] = {
    "train.average.after_steps": (1, _FEW_STEPS),
    "evaluate.microbatch_size": (MAX_MICROBATCH, _SMALL),
    "evaluate.generate.num_samples": (4, _SMALL),
    "evaluate.generate.max_new_tokens": (8, _SMALL),
    "evaluate.generate.batch_size": (2, _SMALL),
    "data.num_workers": (1, _SMALL),
}
"""Upper limits of numeric keys, with the reason; other values stay unchanged."""

_UNVERIFIED = {
    "model.quantization": "the quantized base: the library is not installed here",
    "model.adapter": "that the saved adapter loads",
    "checkpoint.resume": "that the checkpoint of `checkpoint.resume` loads",
    "run.folder": "uploads to the URL of `run.folder`",
    "export.push_to_hub": "the upload to the hub",
    "model.compile": "that the model compiles",
    "train.precision": "fp16 and its loss scaling, or 8-bit products",
}


@dataclass(frozen=True)
class Schedule:
    """The number of steps, the step from which the run is resumed, and the batch."""

    steps: int
    saved_at: int
    microbatch_size: int
    global_batch_size: int


def plan_schedule(config: RunConfig, *, steps: int, processes: int, real_processes: int) -> Schedule:
    """Return the steps of the rehearsal and a small batch, with accumulation where the job has it.

    The job's microbatch is kept if batch norms or an update in the backward pass need it.
    """
    train = config.train
    microbatch = written = smallest_microbatch_size(config)
    if not isinstance(config.model.batch_norm, int) and not train.optimizer.in_backward:
        microbatch = min(written, MAX_MICROBATCH)
    accumulation = min(max(train.global_batch_size // (real_processes * written), 1), MAX_ACCUMULATION)
    return Schedule(steps, math.ceil(steps / 2), microbatch, processes * microbatch * accumulation)


def required_sizes(config: RunConfig) -> Sizes:
    """Return the minimum width that the job's adapters and vectors require of a model."""
    default = Sizes()
    widths, multiple = [default.min_width], default.multiple_of
    lora, oft = config.model.lora, config.model.oft
    if lora is not None and lora.init in _INITIALIZED_FROM_WEIGHTS:
        widths += [2 * rank for rank in (lora.rank, *lora.rank_pattern.values())]
    if TASKS[config.task.name].head == "embedding":
        widths += config.task.embedding.matryoshka_dims
    return Sizes(max(widths), multiple if oft is None else math.lcm(multiple, oft.block_size))


def job_changes(config: RunConfig, schedule: Schedule, *, folder: Path) -> list[Change]:
    """Return a change for each key of the job with another value in the rehearsal."""
    run, model, train, resume = config.run, config.model, config.train, str(config.checkpoint.resume)
    is_own = resume in ("auto", "never")
    values: dict[str, tuple[Any, str]] = {
        "run.folder": (str(folder / "run"), f"{_OUTSIDE}{', and not uploaded' if is_url(str(run.folder)) else ''}"),
        "data.cache_folder": (str(folder / "cache"), _OUTSIDE),
        **_FIXED,
        "train.steps": (schedule.steps, _FEW_STEPS),
        "train.global_batch_size": (schedule.global_batch_size, _SMALL),
        "train.microbatch_size": (schedule.microbatch_size, _SMALL),
        "checkpoint.every_steps": (schedule.saved_at, _FEW_STEPS),
        "checkpoint.resume": ("auto", "the rehearsal resumes its own run" if is_own else "it is for the real model"),
        "evaluate.every_steps": (schedule.saved_at, _FEW_STEPS),
    }
    limits = {f"train.unfreeze.{index}.after_steps": (1, _FEW_STEPS) for index in range(len(train.unfreeze))}
    for key, (limit, why) in {**_LIMITS, **limits}.items():
        written = _at(config, key.split("."))
        if isinstance(written, int) and written > limit:
            values[key] = limit, why
    if (train.schedule.warmup_steps or 0) >= schedule.steps:
        values["train.schedule.warmup_steps"] = 1, _FEW_STEPS
    if train.early_stopping is not None and train.early_stopping.patience <= schedule.steps:
        values["train.early_stopping.patience"] = schedule.steps + 1, _FEW_STEPS
    for name in ("fraction", "hash_fraction"):
        fraction = getattr(config.data.validation, name, None)
        if fraction is not None and fraction < MIN_FRACTION:
            values[f"data.validation.{name}"] = MIN_FRACTION, "a smaller share of few rows could be empty"
    if LOSS_KERNELS[train.loss_kernel].module is not None:
        values["train.loss_kernel"] = "auto", _GPU_ONLY
    if model.attention.startswith("flash"):
        values["model.attention"] = "auto", _GPU_ONLY
    if model.kernels == "liger":
        values["model.kernels"] = "none", _GPU_ONLY
    if OPTIMIZERS[train.optimizer.name].needs_cuda:
        values["train.optimizer.name"] = "adamw", _GPU_ONLY
    if config.data.pin_memory is True:
        values["data.pin_memory"] = "auto", _GPU_ONLY
    if train.precision == "fp8":
        values["train.precision"] = "bf16", _GPU_ONLY
        values["train.fp8"] = None, _GPU_ONLY
    if train.precision == "fp16":
        values["train.precision"] = "bf16", _FP16
        if model.dtype == "float16":
            values["model.dtype"] = "bfloat16", _FP16
    if model.quantization is not None and importlib.util.find_spec(model.quantization.method) is None:
        values["model.quantization"] = None, f"{model.quantization.method} is not installed here"
    unused = unused_keys(config)
    changes = []
    for key, (now, why) in values.items():
        *path, name = key.split(".")
        section = _at(config, path)
        if section is None or key in unused:
            continue
        was = _plain(_at(section, [name]))
        if was != now:
            changes.append(Change(key, "a command" if key == "run.on_end" else was, now, why))
    return changes


def _at(values: Any, path: Iterable[str]) -> Any:
    for name in path:
        if values is None:
            return None
        values = values[int(name)] if name.isdigit() else getattr(values, name)
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def not_verified(changes: Iterable[Change]) -> Iterator[str]:
    """Yield the properties that the rehearsal cannot verify because of these changes."""
    for change in changes:
        is_local = change.key == "run.folder" and not is_url(str(change.was))
        is_own = change.key == "checkpoint.resume" and change.was == "never"
        if change.key in _UNVERIFIED and not is_local and not is_own:
            yield _UNVERIFIED[change.key]
