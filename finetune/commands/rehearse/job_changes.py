"""Overrides of the job file for a few steps on a CPU, each with the reason.

Names in the job (adapters, frozen and trained parameters, layers) are matched with the real model. The small model has
fewer layers, so the number of a layer is replaced by that of the layer at the same relative depth.
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
from finetune.commands.rehearse.widths import Sizes
from finetune.config.paths import is_url
from finetune.config.rules.model import adapter_of
from finetune.config.rules.train import step_problems
from finetune.config.rules.unused_keys import unused_keys
from finetune.config.run_config import RunConfig, smallest_microbatch_size
from finetune.errors import ModelError
from finetune.model.adapters.context import check_module_names
from finetune.model.layers import freeze, matched_parameters, train_only
from finetune.registry.losses import LOSS_KERNELS
from finetune.registry.optimizers import OPTIMIZERS
from finetune.registry.tasks import TASKS

MAX_MICROBATCH, MAX_ACCUMULATION = 2, 2
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


def required_sizes(config: RunConfig) -> Sizes:
    """Return the minimum width that the job's adapters and vectors require of a model."""
    default = Sizes()
    widths, multiple = [default.min_width], default.multiple_of
    lora, other = config.model.lora, config.model.peft
    if lora is not None and lora.init in _INITIALIZED_FROM_WEIGHTS:
        widths += [2 * rank for rank in (lora.rank, *lora.rank_pattern.values())]
    if TASKS[config.task.name].head == "embedding":
        widths += config.task.embedding.matryoshka_dims
    if other is not None and other.type == "oft" and "r" not in other.values:
        multiple = math.lcm(multiple, other.values.get("oft_block_size", 32))
    return Sizes(max(widths), multiple)


def job_changes(config: RunConfig, schedule: RehearsalSteps, *, folder: Path) -> list[Change]:
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


def not_verified(changes: Iterable[Change]) -> Iterator[str]:
    """Yield the properties that the rehearsal cannot verify because of these changes."""
    for change in changes:
        is_local = change.key == "run.folder" and not is_url(str(change.was))
        is_own = change.key == "checkpoint.resume" and change.was == "never"
        if change.key in _UNVERIFIED and not is_local and not is_own:
            yield _UNVERIFIED[change.key]


Matches = Callable[[str, str], bool]
"""Whether a name matches a pattern."""


def match_targets(config: RunConfig, architecture: Architecture) -> list[Change]:
    """Return a change for each key of the job whose layers are others in the small model."""
    small = {stack.name: len(stack.kinds) for stack in architecture.small_stacks}
    sizes = [(stack.name, len(stack.kinds), small.get(stack.name, 0)) for stack in architecture.real_stacks]
    stacks = [stack for stack in sizes if 0 < stack[2] < stack[1]]
    parameters = [name for name, _ in architecture.small.named_parameters(remove_duplicate=False)]
    modules = [name for name, _ in architecture.small.named_modules()]
    lora = config.model.lora
    patterns = [*_parameter_patterns(config), *_module_patterns(config)]
    if lora is not None:
        patterns.append(("model.lora.rank_pattern", lora.rank_pattern, _ends_with))
        patterns.append(("model.lora.alpha_pattern", lora.alpha_pattern, _ends_with))
    values: dict[str, tuple[Any, Any]] = {}
    for key, written, matches in patterns:
        names = parameters if matches is fnmatchcase else modules
        small_names = {pattern: _for_small(pattern, names, matches, stacks) for pattern in written}
        if isinstance(written, Mapping):
            values[key] = dict(written), {small_names[pattern]: value for pattern, value in written.items()}
        else:
            values[key] = list(written), list(dict.fromkeys(small_names.values()))
    if lora is not None and stacks:
        _, num_real, num_small = max(stacks, key=lambda stack: stack[1])
        values["model.lora.layers"] = (
            list(lora.layers),
            sorted({layer * num_small // num_real for layer in lora.layers}),
        )
    why = "mapped to the layers of the small model"
    return [Change(key, was, now, why) for key, (was, now) in values.items() if was != now]


def _for_small(pattern: str, names: Sequence[str], matches: Matches, stacks: Sequence[tuple[str, int, int]]) -> str:
    """Return the pattern with the number of the small model's layer at the same relative depth in place of its own.

    Where that layer has no such name, as it is of another type, the next one that has is taken.
    """
    segments = pattern.split(".")
    for place, segment in enumerate(segments):
        for stack, num_real, num_small in stacks:
            layers = [segment, "*"] if set("[?") & set(segment) else []  # `layers.3[01].*`
            if segment.isdigit():
                depth = int(segment) * num_small // num_real
                layers = [str(layer) for layer in sorted(range(num_small), key=lambda layer: abs(layer - depth))]
            for layer in layers if fnmatchcase(stack, f"*{'.'.join(segments[:place])}") else ():
                candidate = ".".join([*segments[:place], layer, *segments[place + 1 :]])
                if any(matches(name, candidate) for name in names):
                    return candidate
    return pattern


def check_targets(config: RunConfig, architecture: Architecture) -> Iterator[str]:
    """Yield a line for each match of the job's names in the real model; raises ModelError."""
    real, section = architecture.real, config.model
    modules = [name for name, _ in real.named_modules()]
    for key, targets, _ in _module_patterns(config):
        if targets:
            check_module_names(real, tuple(targets), key=key)
            number = sum(_is_module(name, target) for name in modules for target in targets)
            yield f"{key}: {number} modules of the real model"
    if section.lora is not None:
        if section.lora.modules_to_save:
            check_module_names(real, section.lora.modules_to_save, key="model.lora.modules_to_save")
        num_layers = max((len(stack.kinds) for stack in architecture.real_stacks), default=0)
        beyond = [layer for layer in section.lora.layers if layer >= num_layers]
        if beyond:
            raise ModelError(
                f"model.lora.layers: layer {beyond[0]} does not exist in the real model, which has {num_layers} "
                "layers, counted from 0."
            )
    parameters = [name for name, _ in real.named_parameters(remove_duplicate=False)]
    for key, patterns, _ in _parameter_patterns(config):
        for pattern in patterns:
            matched_parameters(pattern, parameters, key=key)
    freeze(real, section.freeze)
    train_only(real, section.train_only)
    if section.freeze or section.train_only:
        trained = sum(parameter.requires_grad for parameter in real.parameters())
        key = "model.freeze" if section.freeze else "model.train_only"
        yield f"{key}: {trained} parameters of the real model are trained"


_Pattern = tuple[str, Sequence[str] | Mapping[str, Any], Matches]
"""Key, patterns, and how they match names."""


def _parameter_patterns(config: RunConfig) -> Iterator[_Pattern]:
    yield "model.freeze", config.model.freeze, fnmatchcase
    yield "model.train_only", config.model.train_only, fnmatchcase
    for index, unfreezing in enumerate(config.train.unfreeze):
        yield f"train.unfreeze.{index}.patterns", unfreezing.patterns, fnmatchcase
    if adapter_of(config) is None:
        yield "train.optimizer.rates", config.train.optimizer.rates, fnmatchcase


def _module_patterns(config: RunConfig) -> Iterator[_Pattern]:
    lora, other = config.model.lora, config.model.peft
    if lora is not None and not isinstance(lora.target_modules, str):
        yield "model.lora.target_modules", lora.target_modules, _is_module
    if other is not None and isinstance(other.values.get("target_modules"), list):
        yield "model.peft.values.target_modules", other.values["target_modules"], _is_module


def _is_module(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _ends_with(name: str, pattern: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None
