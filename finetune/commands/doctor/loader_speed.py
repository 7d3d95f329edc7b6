"""`finetune doctor --data`: measure the job's data loader with several numbers of workers, and recommend one."""

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader

from finetune.commands.printing import number_table, print_table
from finetune.config.load import load_config
from finetune.config.run_config import RunConfig
from finetune.data.batch import Batch
from finetune.data.loader import machine_resources, train_loader
from finetune.report.reporter import RunLog
from finetune.run.setup.training_data import TrainingData, make_training_data
from finetune.runtime.text.terminal import quiet_libraries

NEARLY_FASTEST = 0.9
"""Share of the fastest rate that counts as equally fast."""

MIN_BATCHES = 4

MakeLoader = Callable[..., "DataLoader[Batch]"]
"""From a number of workers and `first_step` to an endless loader of one rank's batches."""


@dataclass(frozen=True)
class LoaderMeasurement:
    """The medians of all rounds with one number of workers."""

    num_workers: int
    first_seconds: float  # until the first batch
    samples_per_second: float
    tokens_per_second: float


def examine_loader(path: Path, overrides: Sequence[str], *, num_rounds: int, seconds: float) -> None:
    """Print samples and tokens per second of the job's loader by number of workers, and the key to write.

    Tokenizes first, as training does. Raises ConfigError and DataError as training does.
    """
    quiet_libraries(is_main=True)
    loaded = load_config(path, overrides)
    config, resources = loaded.config, machine_resources()
    training_data = make_training_data(config, RunLog(is_main=True), locations=loaded.sources)
    numbers = numbers_to_try(resources.cores_per_rank)
    make_loader = partial(_loader, config, training_data)
    log = partial(print, file=sys.stderr, flush=True)
    measurements = measure_loaders(make_loader, numbers, num_rounds=num_rounds, seconds=seconds, log=log)
    device = "copied to the GPU" if resources.has_device else "no GPU"
    print(f"one rank's loader alone, {resources.num_cores} cores, {device}; medians")
    table = number_table("num_workers", "samples/s", "tokens/s", "first batch")
    for measured in measurements:
        table.add_row(
            str(measured.num_workers),
            f"{measured.samples_per_second:,.0f}",
            f"{measured.tokens_per_second:,.0f}",
            f"{measured.first_seconds:.2f} s",
        )
    print_table(table)
    best = choose_measurement(measurements)
    print(f"num_workers: {best.num_workers} is the smallest number that is about as fast as the fastest")
    print(f"\nWrite in {path.name}:\n\ndata:\n  num_workers: {best.num_workers}")


def _loader(config: RunConfig, training_data: TrainingData, num_workers: int, *, first_step: int) -> Any:
    return train_loader(
        training_data.training,
        training_data.task.collate,
        global_batch_size=config.train.global_batch_size,
        microbatch_size=config.train.known_microbatch_size,
        first_step=first_step,
        num_steps=1 << 40,  # only the first are used
        section=config.data.model_copy(update={"num_workers": num_workers, "persistent_workers": False}),
        seed=config.run.seed,
        has_partners=training_data.task.samples.has_partners,
    )


def numbers_to_try(cores_per_rank: int) -> list[int]:
    """Return the numbers of workers to measure.

    >>> numbers_to_try(1), numbers_to_try(10)
    ([0, 1, 2], [0, 1, 2, 4, 8])
    """
    return [0, *(number for number in (1, 2, 4, 8, 16, 32) if number <= max(2, cores_per_rank))]


def measure_loaders(
    make_loader: MakeLoader, numbers: Sequence[int], *, num_rounds: int, seconds: float, log: Callable[[str], None]
) -> list[LoaderMeasurement]:
    """Return the measurements of the numbers of workers; each round measures all of them in a new order."""
    runs: Mapping[int, list[tuple[float, float, float]]] = {number: [] for number in numbers}
    for round_number in range(num_rounds):
        log(f"round {round_number + 1} of {num_rounds}")
        for number in random.Random(round_number).sample(list(numbers), len(numbers)):
            runs[number].append(_measure_once(make_loader(number, first_step=round_number), seconds=seconds))
    return [
        LoaderMeasurement(number, *(median(values) for values in zip(*passes, strict=True)))
        for number, passes in runs.items()
    ]


def _measure_once(loader: "DataLoader[Batch]", *, seconds: float) -> tuple[float, float, float]:
    """Return the seconds until the first batch, and the samples and tokens per second of those after it."""
    started = time.perf_counter()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    batches = (batch if device is None else batch.to(device, non_blocking=True) for batch in loader)
    next(batches)
    first = time.perf_counter()
    samples = tokens = 0
    for number, batch in enumerate(batches, start=1):
        samples, tokens = samples + len(batch.sample_ids), tokens + batch.num_tokens
        if number >= MIN_BATCHES and time.perf_counter() - first >= seconds:
            break
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    elapsed = time.perf_counter() - first
    return first - started, samples / elapsed, tokens / elapsed


def choose_measurement(measurements: Sequence[LoaderMeasurement]) -> LoaderMeasurement:
    """Return the one with the fewest workers that is about as fast as the fastest."""
    best = max(measured.tokens_per_second for measured in measurements)
    enough = [measured for measured in measurements if measured.tokens_per_second >= NEARLY_FASTEST * best]
    return min(enough, key=lambda measured: measured.num_workers)
