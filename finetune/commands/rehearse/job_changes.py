"""Overrides of the job file for a few steps on a CPU, each with the reason.

The small model has fewer layers, so the number of a layer that it lacks is replaced by that of one that it has.
"""

import importlib.util
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from finetune.commands.rehearse.report import Change
from finetune.commands.rehearse.small_model import Architecture
from finetune.commands.rehearse.widths import MIN_WIDTH
from finetune.config.rules.model import adapter_of
from finetune.config.rules.train import step_problems
from finetune.config.rules.unused_keys import unused_keys
from finetune.config.run_config import RunConfig, smallest_microbatch_size
from finetune.registry.losses import LOSS_KERNELS
from finetune.registry.optimizers import OPTIMIZERS

MAX_MICROBATCH, MAX_ACCUMULATION = 2, 2

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
    "report.profile": (None, _FEW_STEPS),
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
    "model.lora.rank": (8, _SMALL),
    "train.average.after_steps": (1, _FEW_STEPS),
    "evaluate.microbatch_size": (MAX_MICROBATCH, _SMALL),
    "evaluate.generate.num_samples": (4, _SMALL),
    "evaluate.generate.max_new_tokens": (8, _SMALL),
    "evaluate.generate.batch_size": (2, _SMALL),
    "data.num_workers": (1, _SMALL),
}
"""Upper limits of numeric keys, with the reason; other values stay unchanged."""


@dataclass(frozen=True)
class RehearsalSteps:
    """The number of steps, the step from which the run is resumed, and the batch."""

    steps: int
    saved_at: int
    microbatch_size: int
    global_batch_size: int


def plan_schedule(config: RunConfig, *, steps: int, processes: int, real_processes: int) -> RehearsalSteps:
    """Return the steps of the rehearsal and a small batch, with accumulation where the job has it.

    The job's microbatch is kept if batch norms or an update in the backward pass need it.
    """
    train = config.train
    microbatch = written = smallest_microbatch_size(config)
    if not isinstance(config.model.batch_norm, int) and not train.optimizer.in_backward:
        microbatch = min(written, MAX_MICROBATCH)
    accumulation = min(max(train.global_batch_size // (real_processes * written), 1), MAX_ACCUMULATION)
    return RehearsalSteps(steps, math.ceil(steps / 2), microbatch, processes * microbatch * accumulation)


def job_changes(config: RunConfig, schedule: RehearsalSteps, *, folder: Path) -> list[Change]:
    """Return a change for each key of the job with another value in the rehearsal."""
    model, train = config.model, config.train
    vector_sizes = [min(size, MIN_WIDTH) for size in config.task.embedding.matryoshka_dims]
    values: dict[str, tuple[Any, str]] = {
        "run.folder": (str(folder / "run"), _OUTSIDE),
        "data.cache_folder": (str(folder / "cache"), _OUTSIDE),
        **_FIXED,
        "train.steps": (schedule.steps, _FEW_STEPS),
        "train.global_batch_size": (schedule.global_batch_size, _SMALL),
        "train.microbatch_size": (schedule.microbatch_size, _SMALL),
        "checkpoint.every_steps": (schedule.saved_at, _FEW_STEPS),
        "checkpoint.resume": ("auto", "the rehearsal resumes its own run"),
        "evaluate.every_steps": (schedule.saved_at, _FEW_STEPS),
        "task.embedding.matryoshka_dims": (list(dict.fromkeys(vector_sizes)), _SMALL),
    }
    limits = {f"train.unfreeze.{index}.after_steps": (1, _FEW_STEPS) for index in range(len(train.unfreeze))}
    for key, (limit, why) in {**_LIMITS, **limits}.items():
        written = _at(config, key.split("."))
        if isinstance(written, int) and written > limit:
            values[key] = limit, why
    for problem in step_problems(config, num_steps=schedule.steps):
        if problem.key == "train.schedule.warmup_steps":
            is_room = train.schedule.decay_fraction * schedule.steps <= schedule.steps - 1
            values[problem.key] = int(is_room), _FEW_STEPS
    if train.early_stopping is not None and train.early_stopping.patience <= schedule.steps:
        values["train.early_stopping.patience"] = schedule.steps + 1, _FEW_STEPS
    on_a_gpu: tuple[tuple[str, bool, str], ...] = (
        ("train.loss_kernel", LOSS_KERNELS[train.loss_kernel].module is not None, "auto"),
        ("train.optimizer.name", OPTIMIZERS[train.optimizer.name].needs_cuda, "adamw"),
        ("model.attention", model.attention.startswith("flash"), "auto"),
        ("model.kernels", model.kernels == "liger", "none"),
        ("data.pin_memory", config.data.pin_memory is True, "auto"),
    )
    values |= {key: (now, _GPU_ONLY) for key, needs_gpu, now in on_a_gpu if needs_gpu}
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


Matches = Callable[[str, str], bool]
"""Whether a name matches a pattern."""


def match_targets(config: RunConfig, architecture: Architecture) -> list[Change]:
    """Return a change for each key of the job whose layers are others in the small model."""
    parameters = [name for name, _ in architecture.small.named_parameters(remove_duplicate=False)]
    modules = [name for name, _ in architecture.small.named_modules()]
    values: dict[str, tuple[Any, Any]] = {}
    for key, written, matches in _patterns(config):
        names = parameters if matches is fnmatchcase else modules
        small_names = {pattern: _for_small(pattern, names, matches) for pattern in written}
        if isinstance(written, Mapping):
            values[key] = dict(written), {small_names[pattern]: value for pattern, value in written.items()}
        else:
            values[key] = list(written), list(dict.fromkeys(small_names.values()))
    lora, num_layers = config.model.lora, max((len(stack.kinds) for stack in architecture.small_stacks), default=1)
    if lora is not None:
        values["model.lora.layers"] = list(lora.layers), sorted({min(layer, num_layers - 1) for layer in lora.layers})
    why = "mapped to the layers of the small model"
    return [Change(key, was, now, why) for key, (was, now) in values.items() if was != now]


def _for_small(pattern: str, names: Sequence[str], matches: Matches) -> str:
    """Return the pattern with the last layer that has such names in place of one that the small model lacks."""
    if any(matches(name, pattern) for name in names):
        return pattern
    layers = sorted({part for name in names for part in name.split(".") if part.isdigit()}, key=int, reverse=True)
    segments = pattern.split(".")
    for place, segment in enumerate(segments):
        is_range = bool(set("[?") & set(segment))  # `layers.3[01].*`
        for layer in ["*"] if is_range else layers if segment.isdigit() else []:
            candidate = ".".join([*segments[:place], layer, *segments[place + 1 :]])
            if any(matches(name, candidate) for name in names):
                return candidate
    return pattern


_Pattern = tuple[str, Sequence[str] | Mapping[str, Any], Matches]
"""Key, patterns, and how they match names."""


def _patterns(config: RunConfig) -> Iterator[_Pattern]:
    model, optimizer = config.model, config.train.optimizer
    yield "model.freeze", model.freeze, fnmatchcase
    yield "model.train_only", model.train_only, fnmatchcase
    for index, unfreezing in enumerate(config.train.unfreeze):
        yield f"train.unfreeze.{index}.patterns", unfreezing.patterns, fnmatchcase
    if adapter_of(config) is None:
        yield "train.optimizer.rates", optimizer.rates, fnmatchcase
    if model.lora is not None:
        yield "model.lora.rank_pattern", model.lora.rank_pattern, _ends_with
        yield "model.lora.alpha_pattern", model.lora.alpha_pattern, _ends_with
        if not isinstance(model.lora.target_modules, str):
            yield "model.lora.target_modules", model.lora.target_modules, _is_module
    if model.peft is not None and isinstance(model.peft.values.get("target_modules"), list):
        yield "model.peft.values.target_modules", model.peft.values["target_modules"], _is_module


def _is_module(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _ends_with(name: str, pattern: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None
