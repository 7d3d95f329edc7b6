"""The job's own settings for a few steps on a CPU: overrides for the job file, and why each is another here."""

import importlib.util
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.commands.rehearse.shrink import Change, Sizes
from finetune.config.paths import is_url
from finetune.config.rules.unused_keys import unused_keys
from finetune.config.run_config import RunConfig, smallest_microbatch_size
from finetune.registry.losses import LOSS_KERNELS
from finetune.registry.tasks import TASKS

MAX_MICROBATCH, MAX_ACCUMULATION = 2, 2
MAX_PROMPTS, MAX_NEW_TOKENS = 4, 8
_FACTORED = ("pissa", "olora", "loftq")

_FEW = "a few steps"
_CPU = "a CPU has none"
_OUTSIDE = "nothing outside the rehearsal is touched"


@dataclass(frozen=True)
class Schedule:
    """How many steps, where the run is resumed, and how the batch is cut."""

    steps: int
    saved_at: int
    microbatch_size: int
    global_batch_size: int


def plan_schedule(config: RunConfig, *, steps: int, processes: int, real_processes: int) -> Schedule:
    """Return the steps of the rehearsal and a small batch, with accumulation where the job has it.

    Where batch norms or an update in the backward pass need the job's microbatch, it is kept.
    """
    train = config.train
    is_fixed = isinstance(config.model.batch_norm, int) or train.optimizer.in_backward
    written = smallest_microbatch_size(config)
    microbatch = written if is_fixed else min(written, MAX_MICROBATCH)
    accumulation = max(train.global_batch_size // (real_processes * written), 1)
    batch = processes * microbatch * min(accumulation, MAX_ACCUMULATION)
    return Schedule(steps, math.ceil(steps / 2), microbatch, batch)


def wanted_sizes(config: RunConfig) -> Sizes:
    """Return the least width that the job's adapters and vectors need of a model."""
    width, multiple = Sizes().min_width, Sizes().multiple_of
    lora, oft = config.model.lora, config.model.oft
    if lora is not None and lora.init in _FACTORED:
        width = max(width, *(2 * rank for rank in (lora.rank, *lora.rank_pattern.values())))
    if TASKS[config.task.name].head == "embedding":
        width = max([width, *config.task.embedding.matryoshka_dims])
    return Sizes(width, math.lcm(multiple, oft.block_size) if oft is not None else multiple)


def job_changes(config: RunConfig, schedule: Schedule, *, folder: Path) -> Iterator[Change]:
    """Yield every key of the job that is another in the rehearsal; those that are the same as written are left out."""
    everything = (
        *_run(config, folder),
        *_train(config, schedule),
        *_checkpoint(config, schedule),
        *_evaluation(config, schedule),
        *_data(config),
        *_model(config),
    )
    unused = unused_keys(config)
    yield from (each for each in everything if each.was != each.now and each.key not in unused)


_NOT_PROVED = {
    "model.quantization": "the quantized base: the library is not installed here",
    "model.adapter": "that the saved adapter loads",
    "checkpoint.resume": "that the checkpoint of `checkpoint.resume` loads",
    "run.folder": "uploads to the URL of `run.folder`",
    "export.push_to_hub": "the upload to the hub",
    "model.compile": "that the model compiles",
    "train.precision": "fp16 and its loss scaling",
}


def not_proved(changes: Iterable[Change]) -> Iterator[str]:
    """Yield what the rehearsal leaves open because these were replaced."""
    for change in changes:
        is_local = change.key == "run.folder" and not is_url(str(change.was))
        is_own = change.key == "checkpoint.resume" and change.was == "never"
        if change.key in _NOT_PROVED and not is_local and not is_own:
            yield _NOT_PROVED[change.key]


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return the values as `--set` takes them: JSON is YAML."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _run(config: RunConfig, folder: Path) -> Iterator[Change]:
    run = config.run
    remote = ", and not uploaded" if is_url(str(run.folder)) else ""
    yield Change("run.folder", str(run.folder), str(folder / "run"), f"{_OUTSIDE}{remote}")
    yield Change("data.cache_folder", _text(config.data.cache_folder), str(folder / "cache"), _OUTSIDE)
    yield Change("run.local_folder", _text(run.local_folder), None, _OUTSIDE)
    yield Change("run.spot_notice", run.spot_notice, None, "this machine has no such notices")
    yield Change("run.on_end", None if run.on_end is None else "a command", None, _OUTSIDE)
    yield Change("report.trackers", list(config.report.trackers), [], _OUTSIDE)
    yield Change("report.project", config.report.project, None, _OUTSIDE)
    yield Change("report.log_every_steps", config.report.log_every_steps, 1, _FEW)
    yield Change("report.console", config.report.console, "plain", "its output is a log")
    yield Change("export.push_to_hub", config.export.push_to_hub, None, _OUTSIDE)
    if not config.export.private:
        yield Change("export.private", False, True, _OUTSIDE)
    yield Change("export.verify", config.export.verify, True, "the export is proved here")


def _text(path: Any) -> str | None:
    return None if path is None else str(path)


def _train(config: RunConfig, schedule: Schedule) -> Iterator[Change]:
    train = config.train
    yield Change("train.steps", train.steps, schedule.steps, _FEW)
    yield Change("train.epochs", train.epochs, None, _FEW)
    yield Change("train.tokens", train.tokens, None, _FEW)
    yield Change("train.global_batch_size", train.global_batch_size, schedule.global_batch_size, "to fit a CPU")
    yield Change("train.microbatch_size", train.microbatch_size, schedule.microbatch_size, "to fit a CPU")
    yield Change("train.stop_after_steps", train.stop_after_steps, None, _FEW)
    yield Change("train.time_limit_minutes", train.time_limit_minutes, None, "the rehearsal has its own")
    if (train.schedule.warmup_steps or 0) >= schedule.steps:
        yield Change("train.schedule.warmup_steps", train.schedule.warmup_steps, 1, _FEW)
    for index, each in enumerate(train.unfreeze):
        yield Change(f"train.unfreeze.{index}.after_steps", each.after_steps, min(each.after_steps, 1), _FEW)
    if train.average is not None:
        yield Change("train.average.after_steps", train.average.after_steps, min(train.average.after_steps, 1), _FEW)
    if train.early_stopping is not None and train.early_stopping.patience <= schedule.steps:
        yield Change("train.early_stopping.patience", train.early_stopping.patience, schedule.steps + 1, _FEW)
    if train.precision == "fp16":
        yield Change("train.precision", "fp16", "bf16", "a CPU does not train in fp16")
    yield Change("train.tf32", train.tf32, "auto", _CPU)
    if LOSS_KERNELS[train.loss_kernel].module is not None:
        yield Change("train.loss_kernel", train.loss_kernel, "auto", _CPU)


def _checkpoint(config: RunConfig, schedule: Schedule) -> Iterator[Change]:
    checkpoint = config.checkpoint
    yield Change("checkpoint.every_steps", checkpoint.every_steps, schedule.saved_at, _FEW)
    yield Change("checkpoint.keep_every_steps", checkpoint.keep_every_steps, None, _FEW)
    yield Change(
        "checkpoint.resume",
        str(checkpoint.resume),
        "auto",
        "the rehearsal resumes its own run" if checkpoint.resume in ("auto", "never") else "it is for the real model",
    )


def _evaluation(config: RunConfig, schedule: Schedule) -> Iterator[Change]:
    evaluate = config.evaluate
    if evaluate is None:
        return
    yield Change("evaluate.every_steps", evaluate.every_steps, schedule.saved_at, _FEW)
    if isinstance(evaluate.microbatch_size, int):
        size = min(evaluate.microbatch_size, MAX_MICROBATCH)
        yield Change("evaluate.microbatch_size", evaluate.microbatch_size, size, "to fit a CPU")
    if evaluate.generate is not None:
        for name, most in (("num_samples", MAX_PROMPTS), ("max_new_tokens", MAX_NEW_TOKENS), ("batch_size", 2)):
            written = getattr(evaluate.generate, name)
            yield Change(f"evaluate.generate.{name}", written, min(written, most), "to fit a CPU")


def _data(config: RunConfig) -> Iterator[Change]:
    data = config.data
    for name in ("truncated_rows", "dropped_rows", "lost_targets", "duplicate_samples", "unknown_tokens"):
        key = f"max_{name}"
        yield Change(f"data.audit.{key}", getattr(data.audit, key), None, "the rows are no fair sample of all")
    yield Change("data.prepare_workers", data.prepare_workers, 0, "few rows")
    if isinstance(data.num_workers, int):
        yield Change("data.num_workers", data.num_workers, min(data.num_workers, 1), "to fit a CPU")
    yield Change("data.pin_memory", data.pin_memory, data.pin_memory and "auto", _CPU)


def _model(config: RunConfig) -> Iterator[Change]:
    section = config.model
    if section.attention.startswith("flash"):
        yield Change("model.attention", section.attention, "auto", _CPU)
    yield Change("model.compile", section.compile, "off", "compiling takes longer than the rehearsal")
    yield Change("model.activation_offload", section.activation_offload, False, _CPU)
    if config.train.precision == "fp16" and section.dtype == "float16":
        yield Change("model.dtype", "float16", "bfloat16", "a CPU does not train in fp16")
    if section.quantization is not None and importlib.util.find_spec(section.quantization.method) is None:
        why = f"{section.quantization.method} is not installed here"
        yield Change("model.quantization", section.quantization.model_dump(), None, why)
