"""Overrides of the job file for a few steps on a CPU, each with the reason.

Names in the job (adapters, frozen and trained parameters, layers) are matched with the real model. The small model has
fewer layers. Each of them represents a real one, and a pattern that selects layers is replaced by the names of the
layers that represent its matches.
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
from finetune.model.layers import LayerStack, freeze, matched_parameters, train_only
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


_WHY = "mapped to the layers of the small model"

Matches = Callable[[str, str], bool]
"""Whether a name matches a pattern."""


def match_targets(config: RunConfig, architecture: Architecture) -> list[Change]:
    """Return a change for each key of the job whose names are others in the small model."""
    names = _Names(architecture)
    changes = []
    patterns = [*_parameter_patterns(config), *_module_patterns(config)]
    if config.model.lora is not None:
        patterns.append(("model.lora.rank_pattern", config.model.lora.rank_pattern, _ends_with))
        patterns.append(("model.lora.alpha_pattern", config.model.lora.alpha_pattern, _ends_with))
    for key, written, matches in patterns:
        if isinstance(written, Mapping):
            was: Any = dict(written)
            now: Any = {name: value for pattern, value in was.items() for name in names.for_small([pattern], matches)}
        else:
            was, now = list(written), names.for_small(written, matches)
        if list(now) != list(was):
            changes.append(Change(key, was, now, _WHY))
    layers = config.model.lora.layers if config.model.lora is not None else ()
    small_layers = names.small_layers(layers)
    if small_layers != list(layers):
        changes.append(Change("model.lora.layers", list(layers), small_layers, _WHY))
    return changes


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


class _Names:
    """The names in both models, and which layer of the real one a layer of the small one stands for."""

    def __init__(self, architecture: Architecture) -> None:
        models = (architecture.real, architecture.small)
        self._parameters = [[name for name, _ in model.named_parameters(remove_duplicate=False)] for model in models]
        self._modules = [[name for name, _ in model.named_modules()] for model in models]
        small = {stack.name: stack for stack in architecture.small_stacks}
        self._stacks = [(stack, small[stack.name]) for stack in architecture.real_stacks if stack.name in small]

    def for_small(self, patterns: Iterable[str], matches: Matches) -> list[str]:
        """Return the names for the small model; a pattern with the same matches there is kept."""
        real, small = self._parameters if matches is fnmatchcase else self._modules
        names: list[str] = []
        for pattern in patterns:
            selected = {name for name in small if matches(self._renamed(name, to_real=True), pattern)}
            direct = {name for name in small if matches(name, pattern)}
            if not selected:  # its layers were removed: use their representatives
                selected = {self._renamed(name, to_real=False) for name in real if matches(name, pattern)} & set(small)
            names += [name for name in small if name in selected] if selected and selected != direct else [pattern]
        return list(dict.fromkeys(names))

    def small_layers(self, layers: Sequence[int]) -> list[int]:
        """Return the layers of the small model that represent these."""
        if not self._stacks or not layers:
            return list(layers)
        real, small = max(self._stacks, key=lambda stacks: len(stacks[0].kinds))
        kept = [index for index in range(len(small.kinds)) if real_layer(index, real=real, small=small) in layers]
        return kept or sorted({small_layer(index, real=real, small=small) for index in layers})

    def _renamed(self, name: str, *, to_real: bool) -> str:
        """Return the name with the index of the corresponding real or small layer."""
        for real, small in self._stacks:
            index, dot, rest = name.removeprefix(f"{real.name}.").partition(".")
            if name.startswith(f"{real.name}.") and index.isdigit():
                stands_for = real_layer if to_real else small_layer
                return f"{real.name}.{stands_for(int(index), real=real, small=small)}{dot}{rest}"
        return name


def real_layer(index: int, *, real: LayerStack, small: LayerStack) -> int:
    """Return the real layer that a small one represents: of the same type, at the same relative depth."""
    depth = index * (len(real.kinds) - 1) / max(len(small.kinds) - 1, 1)
    return _nearest(depth, small.kinds[index], real)


def small_layer(index: int, *, real: LayerStack, small: LayerStack) -> int:
    """Return the small layer that represents a real one: of the same type, at the same relative depth."""
    return _nearest(int(index * len(small.kinds) / len(real.kinds)), real.kinds[index], small)


def _nearest(depth: float, kind: Any, stack: LayerStack) -> int:
    same = [index for index, own in enumerate(stack.kinds) if own == kind] or range(len(stack.kinds))
    return min(same, key=lambda index: abs(index - depth))
