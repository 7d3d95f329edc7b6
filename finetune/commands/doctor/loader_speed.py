"""`finetune doctor --data`: measure the job's data loader with several numbers of workers, and recommend settings."""

import json
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
from rich.table import Table
from torch.utils.data import DataLoader

from finetune.commands.printing import number_table, print_table
from finetune.config.load import load_config
from finetune.config.run_config import RunConfig
from finetune.data.batch import Batch
from finetune.data.loader import LoaderSettings, MachineResources, machine_resources, train_loader
from finetune.report.history import EVENTS_FILE, read_history
from finetune.report.reporter import RunLog
from finetune.run.setup.training_data import TrainingData, make_training_data
from finetune.runtime.files.read import read_json
from finetune.runtime.text.terminal import quiet_libraries

MAX_WAITING_SHARE = 0.02
"""Share of a step that may be spent waiting: saving less does not justify another worker."""

NEARLY_FASTEST = 0.9
"""Share of the fastest rate that counts as equally fast, if the speed of the model is unknown."""

WARM_UP_STEPS, MIN_BATCHES = 2, 4

MakeLoader = Callable[..., "DataLoader[Batch]"]
"""From settings and `first_step` to a loader of one rank's batches, endless unless `num_steps` is given."""


@dataclass(frozen=True)
class LoaderMeasurement:
    """The medians of all rounds of one setting."""

    settings: LoaderSettings
    first_seconds: float  # until the first batch
    samples_per_second: float
    tokens_per_second: float
    spread: float = 0.0  # difference of the fastest and the slowest round, as a share of the median


def examine_loader(path: Path, overrides: Sequence[str], *, num_rounds: int, seconds: float) -> None:
    """Print samples and tokens per second of the job's loader for a range of settings, and the keys to write.

    Tokenizes first, as training does. Where the job's run folder has events of an earlier run, the answer is based on
    the rate at which that run consumed tokens. Raises ConfigError and DataError as training does.
    """
    quiet_libraries(is_main=True)
    loaded = load_config(path, overrides)
    config, resources = loaded.config, machine_resources()
    training_data = make_training_data(config, RunLog(is_main=True), locations=loaded.sources)
    make_loader = partial(_loader, config, training_data)
    settings = settings_to_try(resources)
    log = partial(print, file=sys.stderr, flush=True)
    measurements = measure_loaders(make_loader, settings, num_rounds=num_rounds, seconds=seconds, log=log)
    consumed = tokens_per_second_of_a_rank(Path(config.run.folder))
    device = "copied to the GPU" if resources.has_device else "no GPU"
    print(f"one rank's loader alone, {resources.num_cores} cores, {device}; medians; spread: (max - min) / median")
    print_table(loading_table(measurements, consumed))
    best = choose_settings(measurements, consumed)
    number, run_folder = best.settings.num_workers, config.run.folder
    if consumed is None:
        print(
            f"num_workers: {number} is the smallest number that is about as fast as the fastest. {run_folder} has no "
            "run that shows the speed of the model: train a few steps and repeat this command for a better answer."
        )
    else:
        print(
            f"a rank of the run in {run_folder} consumes {consumed:,.0f} tokens/s while it computes: with num_workers: "
            f"{number} a step waits {waiting_share(best, consumed):.1%} of its time"
        )
    print(f"\nWrite in {path.name}:\n\ndata:\n{yaml_lines(best.settings)}")


def loading_table(measurements: Sequence[LoaderMeasurement], consumed: float | None) -> Table:
    """Return a row for each setting, with the share of a step spent waiting if the rate of a run is known."""
    names = ["num_workers", "prefetch_factor", "pin_memory", "samples/s", "spread", "tokens/s", "first batch"]
    table = number_table(*names, *(() if consumed is None else ("a step waits",)))
    for measured in measurements:
        settings = measured.settings
        waits = () if consumed is None else (f"{waiting_share(measured, consumed):.1%}",)
        table.add_row(
            str(settings.num_workers),
            str(settings.prefetch_factor or "-"),
            json.dumps(settings.pin_memory),
            f"{measured.samples_per_second:,.0f}",
            f"{measured.spread:.0%}",
            f"{measured.tokens_per_second:,.0f}",
            f"{measured.first_seconds:.2f} s",
            *waits,
        )
    return table


def yaml_lines(settings: LoaderSettings) -> str:
    """Return the keys of `data:` for these settings."""
    keys: dict[str, Any] = {"num_workers": settings.num_workers, "pin_memory": settings.pin_memory}
    if settings.num_workers:
        keys |= {"persistent_workers": True, "prefetch_factor": settings.prefetch_factor}
    return "\n".join(f"  {name}: {json.dumps(value)}" for name, value in keys.items())


def _loader(
    config: RunConfig,
    training_data: TrainingData,
    settings: LoaderSettings,
    *,
    first_step: int,
) -> Any:
    keys = {
        "num_workers": settings.num_workers,
        "pin_memory": settings.pin_memory,
        "persistent_workers": settings.persistent_workers,
        "prefetch_factor": settings.prefetch_factor,
    }
    return train_loader(
        training_data.training,
        training_data.task.collate,
        global_batch_size=config.train.global_batch_size,
        microbatch_size=config.train.known_microbatch_size,
        first_step=first_step,
        num_steps=1 << 40,  # only the first are used
        section=config.data.model_copy(update=keys),
        seed=config.run.seed,
        has_partners=training_data.task.samples.has_partners,
    )


def settings_to_try(resources: MachineResources) -> list[LoaderSettings]:
    """Return the settings to measure on this machine: 0, 1, 2, 4, ... workers, up to its cores per rank."""
    numbers = [number for number in (1, 2, 4, 8, 16, 32) if number <= max(2, resources.cores_per_rank)]
    pins = (False, True) if resources.has_device else (False,)
    settings = [LoaderSettings(0, pin, False, None) for pin in pins]
    for number in numbers:
        settings += [LoaderSettings(number, pin, False, 2) for pin in pins]
        settings.append(LoaderSettings(number, resources.has_device, False, 4))
    return settings


def measure_loaders(
    make_loader: MakeLoader,
    settings: Sequence[LoaderSettings],
    *,
    num_rounds: int,
    seconds: float,
    log: Callable[[str], None],
) -> list[LoaderMeasurement]:
    """Return the measurements of the settings; each round measures all of them in a new order."""
    runs: Mapping[LoaderSettings, list[tuple[float, float, float]]] = {setting: [] for setting in settings}
    for number in range(num_rounds):
        log(f"round {number + 1} of {num_rounds}")
        for setting in random.Random(number).sample(list(settings), len(settings)):
            runs[setting].append(_measure_once(make_loader(setting, first_step=number), seconds=seconds))
    measurements = []
    for setting, passes in runs.items():
        first, samples, tokens = (median(values) for values in zip(*passes, strict=True))
        rates = [rate for _, rate, _ in passes]
        spread = (max(rates) - min(rates)) / samples if samples else 0.0
        measurements.append(LoaderMeasurement(setting, first, samples, tokens, spread))
    return measurements


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


def waiting_share(measured: LoaderMeasurement, consumed_per_second: float) -> float:
    """Return the share of a step that a rank waits if it consumes this number of tokens per second of computing.

    Without workers a batch is loaded before it is used; with workers, during the computation of the previous one.
    """
    loaded = measured.tokens_per_second
    if measured.settings.num_workers == 0:
        return consumed_per_second / (consumed_per_second + loaded)
    return max(0.0, 1.0 - loaded / consumed_per_second)


def choose_settings(measurements: Sequence[LoaderMeasurement], consumed_per_second: float | None) -> LoaderMeasurement:
    """Return the fastest setting among those with the fewest workers that are fast enough, else the fastest of all."""
    if consumed_per_second is None:
        best = max(measured.tokens_per_second for measured in measurements)
        enough = [measured for measured in measurements if measured.tokens_per_second >= NEARLY_FASTEST * best]
    else:
        waiting = {measured: waiting_share(measured, consumed_per_second) for measured in measurements}
        enough = [measured for measured in measurements if waiting[measured] <= MAX_WAITING_SHARE]
        if not enough:
            return min(
                measurements,
                key=lambda own: (waiting[own], own.settings.num_workers, own.settings.prefetch_factor or 0),
            )
    fewest = min(measured.settings.num_workers for measured in enough)
    candidates = [measured for measured in enough if measured.settings.num_workers == fewest]
    return max(candidates, key=lambda own: (own.tokens_per_second, -(own.settings.prefetch_factor or 0)))


def tokens_per_second_of_a_rank(run_folder: Path) -> float | None:
    """Return the tokens that one rank of the run has consumed per second of computing; None without events."""
    if not (run_folder / EVENTS_FILE).is_file():
        return None
    rates = read_history(run_folder).steps.compute_rates(num_warm_up=WARM_UP_STEPS)
    try:
        world = int(read_json(run_folder / "environment.json")["launcher"].get("WORLD_SIZE", "1"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        world = 1
    return median(rates.tolist()) / world if len(rates) else None
