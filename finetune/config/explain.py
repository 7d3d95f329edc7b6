"""Formats a config: as `resolved.yaml`, with the source of every value, and as the lines that `check` prints."""

import json
import math
from collections.abc import Iterator
from typing import Any

from finetune.config.load import LoadedConfig
from finetune.config.paths import is_url, local_run_folder
from finetune.config.rules.unused_keys import unused_keys
from finetune.config.run_config import (
    RunConfig,
    possible_microbatch_sizes,
    smallest_microbatch_size,
    with_run_folder,
)
from finetune.config.section import KeyLocations, Section, join_key
from finetune.config.sections.data import MixedSourceSection, SourceSection, TrainedSourceSection
from finetune.runtime.text.redact import redacted_config
from finetune.runtime.text.terminal import escape_controls

SOURCE_COLUMN = 56
"""Column of the sources, if the value leaves room."""


def resolved_yaml(loaded: LoadedConfig) -> str:
    """Return the whole config as YAML, every value followed by its source: file and line, override, or default.

    Read as a job, it gives the same config: keys without effect in this combination are comments.
    """
    head = f"# {escape_controls(loaded.path.name)} as it was run, with the source of every value. Paths are absolute."
    config = loaded.config if loaded.remote is None else with_run_folder(loaded.config, loaded.remote)
    lines = _lines(config, loaded.sources, prefix="", unused=unused_keys(config))
    return "\n".join([head, *lines]) + "\n"


def _lines(section: Section, sources: KeyLocations, *, prefix: str, unused: frozenset[str]) -> Iterator[str]:
    indent = "  " * (prefix.count(".") + 1 if prefix else 0)
    for name in type(section).model_fields:
        value, key = getattr(section, name), join_key(prefix, name)
        if isinstance(value, Section):
            inner = list(_lines(value, sources, prefix=key, unused=unused))
            is_all_comment = all(line.lstrip().startswith("#") for line in inner)
            yield f"{indent}{name}:{' {}' if is_all_comment else ''}"
            yield from inner
        elif key in unused:
            yield f"{indent}# {name}: {_format_yaml_value(name, value)}  (no effect here)"
        else:
            yield (
                f"{f'{indent}{name}: {_format_yaml_value(name, value)}':<{SOURCE_COLUMN}}  # "
                f"{_format_location(key, sources)}"
            )


def _format_location(key: str, sources: KeyLocations) -> str:
    source = sources.get(key)
    if source is None:
        return "default"
    is_override = source.line is None and source.where.startswith("--set")
    return "--set" if is_override else escape_controls(str(source))


def _format_yaml_value(name: str, value: Any) -> str:
    """Return the value as YAML 1.2 on one line, without secrets: JSON, with control characters of terminals escaped."""
    plain = json.loads(json.dumps(value, default=_set_keys))
    return escape_controls(json.dumps(redacted_config(plain, name=name), ensure_ascii=False))


def _set_keys(section: Section) -> dict[str, Any]:
    """Return the keys of a section in a list that were set, without defaults."""
    return section.model_dump(exclude_unset=True)


_MAX_LISTED_WORLD_SIZES = 50
"""Maximum number of listed world sizes."""


def format_summary(config: RunConfig, *, num_processes: int | None) -> tuple[str, ...]:
    """Return the lines that `finetune check` prints; the batch must be divisible among the processes."""
    return (
        f"task     {config.task.name}, from {_format_rows(config)}",
        f"model    {_format_model(config)}",
        f"batch    {_format_batch(config, num_processes)}",
        f"budget   {_format_budget(config)}, learning rate {config.train.learning_rate:g}, "
        f"{config.train.schedule.name}",
        f"writes   {_format_destination(config)}",
    )


def _format_destination(config: RunConfig) -> str:
    folder = config.run.folder
    return (
        f"{folder}, written first to {local_run_folder(folder, config.run.local_folder)}" if is_url(folder) else folder
    )


def _format_rows(config: RunConfig) -> str:
    train, validation = config.data.train, config.data.validation
    mix = ", ".join(f"{_format_dataset(source)} ({_format_mix_share(source)})" for source in train.mix)
    trained_on = f"a mix of {mix}" if mix else _format_dataset(train)
    if validation is None:
        return trained_on
    excluded = ", whose rows are excluded from training" if validation.exclude_from_train else ""
    if validation.fraction is not None:
        return f"{trained_on}, evaluated on {validation.fraction:.3g} of its rows{excluded}"
    if validation.hash_fraction is not None:
        return f"{trained_on}, evaluated on {validation.hash_fraction:.3g} of its rows, split by content"
    return f"{trained_on}, evaluated on {_format_dataset(validation)}{excluded}"


def _format_dataset(source: SourceSection) -> str:
    streamed = " as a stream" if isinstance(source, TrainedSourceSection) and source.stream is not None else ""
    return f"{source.path or source.name or f'the source {source.source}'}{streamed}"


def _format_mix_share(source: MixedSourceSection) -> str:
    amounts = {"weight": source.weight, "rows": source.rows, "epochs": source.epochs}
    return ", ".join(f"{name} {value:g}" for name, value in amounts.items() if value is not None)


def _format_model(config: RunConfig) -> str:
    section = config.model
    source = section.name or f"a new {section.from_config.model_type if section.from_config else 'model'}"
    if section.lora is not None:
        trained = f"LoRA of rank {section.lora.rank} on {section.dtype} weights"
    else:
        trained = f"all weights but {len(section.freeze)} frozen patterns" if section.freeze else "all weights"
        trained += f" in {section.dtype}"
    return f"{source}: {trained}, computed in {config.train.precision}"


def _format_batch(config: RunConfig, num_processes: int | None) -> str:
    batch, microbatch = config.train.global_batch_size, smallest_microbatch_size(config)
    is_auto = config.train.microbatch_size == "auto"
    if num_processes is not None and is_auto:
        sizes = ", ".join(map(str, possible_microbatch_sizes(config, num_processes=num_processes)))
        return (
            f"{batch} per step = {_processes(num_processes)} x the most that fit of {sizes} per microbatch x the rest"
        )
    if num_processes is not None:
        accumulated = batch // (num_processes * microbatch)
        return (
            f"{batch} per step = {_processes(num_processes)} x {microbatch} per microbatch x {accumulated} accumulated"
        )
    share = batch // microbatch
    fitting = _divisors(share)
    shown = ", ".join(map(str, fitting[:_MAX_LISTED_WORLD_SIZES])) + (
        ", ..." if len(fitting) > _MAX_LISTED_WORLD_SIZES else ""
    )
    size = "as many as fit" if is_auto else str(microbatch)
    of = "the rest" if is_auto else str(share)
    return f"{batch} per step = {size} per microbatch x {of}; fits on {shown} processes"


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _format_budget(config: RunConfig) -> str:
    train = config.train
    if train.steps is not None:
        return f"{train.steps} steps = {train.steps * train.global_batch_size} {config.data.batching.unit}"
    return f"{train.epochs:g} epochs" if train.epochs is not None else f"{train.tokens} tokens"
