"""Formats a config: as `resolved.yaml`, with the source of every value, and as the lines that `check` prints."""

import json
from collections.abc import Iterator
from typing import Any

from finetune.config.formatting import escape_variables
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
from finetune.config.sections.data import SourceSection, TrainedSourceSection
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
            source = sources.get(key)
            is_override = source is not None and source.line is None and source.where.startswith("--set")
            origin = "default" if source is None else "--set" if is_override else escape_controls(str(source))
            yield f"{f'{indent}{name}: {_format_yaml_value(name, value)}':<{SOURCE_COLUMN}}  # {origin}"


def _format_yaml_value(name: str, value: Any) -> str:
    """Return the value as YAML 1.2 on one line, without secrets: JSON, with control characters of terminals escaped.

    Of sections in a list, only the keys that were set are in it.
    """
    plain = json.loads(json.dumps(value, default=lambda section: section.model_dump(exclude_unset=True)))
    return escape_controls(escape_variables(json.dumps(redacted_config(plain, name=name), ensure_ascii=False)))


_MAX_WORLD_SIZE = 1_024
"""The largest number of processes that is listed as one on which the job fits."""


def format_summary(config: RunConfig, *, num_processes: int | None) -> tuple[str, ...]:
    """Return the lines that `finetune check` prints; the batch must be divisible among the processes."""
    model, train, folder = config.model, config.train, config.run.folder
    source = model.name or f"a new {model.from_config.model_type if model.from_config else 'model'}"
    if model.lora is not None:
        trained = f"LoRA of rank {model.lora.rank} on {model.dtype} weights"
    else:
        trained = f"all weights but {len(model.freeze)} frozen patterns" if model.freeze else "all weights"
        trained += f" in {model.dtype}"
    budget = (
        f"{train.epochs:g} epoch{'s' * (train.epochs != 1)}" if train.epochs is not None else f"{train.tokens} tokens"
    )
    if train.steps is not None:
        budget = f"{train.steps} steps = {train.steps * train.global_batch_size} {config.data.batching.unit}"
    data, validation = config.data.train, config.data.validation
    parts = []
    for part in data.mix:
        amounts = {"weight": part.weight, "rows": part.rows, "epochs": part.epochs}
        shares = ", ".join(f"{name} {value:g}" for name, value in amounts.items() if value is not None)
        parts.append(f"{_format_dataset(part)} ({shares})")
    rows = f"a mix of {', '.join(parts)}" if parts else _format_dataset(data)
    if validation is not None:
        share = validation.fraction or validation.hash_fraction
        rows += f", evaluated on {f'{share:.3g} of its rows' if share else _format_dataset(validation)}"
    local = f", written first to {local_run_folder(folder, config.run.local_folder)}" if is_url(folder) else ""
    return (
        f"task     {config.task.name}, from {rows}",
        f"model    {source}: {trained}, computed in {train.precision}",
        f"batch    {_format_batch(config, num_processes)}",
        f"budget   {budget}, learning rate {train.learning_rate:g}, {train.schedule.name}",
        f"writes   {folder}{local}",
    )


def _format_dataset(source: SourceSection) -> str:
    streamed = " as a stream" if isinstance(source, TrainedSourceSection) and source.stream is not None else ""
    return f"{source.path or source.name or f'the source {source.source}'}{streamed}"


def _format_batch(config: RunConfig, num_processes: int | None) -> str:
    batch, microbatch = config.train.global_batch_size, smallest_microbatch_size(config)
    is_auto = config.train.microbatch_size == "auto"
    processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
    if num_processes is not None and is_auto:
        sizes = ", ".join(map(str, possible_microbatch_sizes(config, num_processes=num_processes)))
        return f"{batch} per step = {processes} x the most that fit of {sizes} per microbatch x the rest"
    if num_processes is not None:
        accumulated = batch // (num_processes * microbatch)
        return f"{batch} per step = {processes} x {microbatch} per microbatch x {accumulated} accumulated"
    share = batch // microbatch
    fitting = [size for size in range(1, _MAX_WORLD_SIZE + 1) if share % size == 0]
    shown = ", ".join(map(str, fitting))
    size = "as many as fit" if is_auto else str(microbatch)
    of = "the rest" if is_auto else str(share)
    return f"{batch} per step = {size} per microbatch x {of}; fits on {shown} process{'es' * (fitting != [1])}"
