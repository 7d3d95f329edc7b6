"""`finetune doctor --data`: measure the job's data loader with several numbers of workers, and say what to set."""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from finetune.commands.doctor.loader_speed import LoaderMeasurement, measure, seconds_between_passes, settings_to_try
from finetune.commands.printing import print_table
from finetune.config.load import load_config
from finetune.config.run_config import RunConfig
from finetune.data.loader import train_loader
from finetune.data.workers import LoaderSettings, MachineResources, machine_resources
from finetune.report.history import EVENTS_FILE, read_history
from finetune.report.run_log import RunLog
from finetune.run.setup.data import TrainingData, make_training_data
from finetune.runtime.files.read import read_json
from finetune.runtime.text.library_output import quiet_libraries

MAX_WAITING_SHARE = 0.02
"""Share of a step that may be spent waiting: less is not worth a process."""

NEARLY_FASTEST = 0.9
"""Where nobody knows how fast the model is: a share of the fastest pace that is as good as the fastest."""

WARM_UP_STEPS = 2


def waiting_share(measured: LoaderMeasurement, consumed_per_second: float) -> float:
    """Return the share of a step that a rank would wait which consumes so many tokens per second of computing.

    Without workers a batch is loaded before it is computed on; with workers, while the one before it is.
    """
    loaded = measured.tokens_per_second
    if measured.settings.num_workers == 0:
        return consumed_per_second / (consumed_per_second + loaded)
    return max(0.0, 1.0 - loaded / consumed_per_second)


def choose_settings(found: Sequence[LoaderMeasurement], consumed_per_second: float | None) -> LoaderMeasurement:
    """Return the setting with the fewest workers that is fast enough, or the fastest where none is."""
    by_cost = sorted(found, key=lambda each: (each.settings.num_workers, each.settings.prefetch_factor or 0))
    if consumed_per_second is None:
        best = max(each.tokens_per_second for each in found)
        return _fastest_of([each for each in by_cost if each.tokens_per_second >= NEARLY_FASTEST * best])
    enough = [each for each in by_cost if waiting_share(each, consumed_per_second) <= MAX_WAITING_SHARE]
    if enough:
        return _fastest_of(enough)
    return min(by_cost, key=lambda each: waiting_share(each, consumed_per_second))


def tokens_per_second_of_a_rank(run_folder: Path) -> float | None:
    """Return the tokens that one rank of the run has consumed per second of computing; None where no run tells."""
    if not (run_folder / EVENTS_FILE).is_file():
        return None
    rates = read_history(run_folder).steps.compute_rates(num_warm_up=WARM_UP_STEPS)
    return median(rates.tolist()) / _world(run_folder) if len(rates) else None


def _fastest_of(sufficient: Sequence[LoaderMeasurement]) -> LoaderMeasurement:
    """Return the fastest of those that have as few workers as the first."""
    fewest = sufficient[0].settings.num_workers
    return max(
        (each for each in sufficient if each.settings.num_workers == fewest), key=lambda each: each.tokens_per_second
    )


def _world(run_folder: Path) -> int:
    try:
        return int(read_json(run_folder / "environment.json")["launcher"].get("WORLD_SIZE", "1"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 1


_ENDLESS = 1 << 40
"""Steps of a loader of which only the first are taken."""


def examine_loader(path: Path, overrides: Sequence[str], *, num_rounds: int, seconds: float) -> None:
    """Print samples and tokens per second of the job's loader for each setting worth a try, and what to write.

    Tokenises first, as training would. Where the job's run folder has events of an earlier run, the answer counts on
    how fast that one consumed. Raises ConfigError and DataError as training does.
    """
    quiet_libraries(is_main=True)
    loaded = load_config(path, overrides)
    config, resources = loaded.config, machine_resources()
    lessons = make_training_data(config, RunLog(is_main=True), locations=loaded.sources)
    make_loader = partial(_loader, config, lessons)
    tried = settings_to_try(resources)
    found = measure(make_loader, tried, num_rounds=num_rounds, seconds=seconds, log=_log)
    consumed = tokens_per_second_of_a_rank(Path(config.run.folder))
    print(_where(resources))
    print_table(loading_table(found, consumed))
    best = choose_settings(found, consumed)
    restart = _restarts(make_loader, best.settings)
    print(_reason(best, consumed, run_folder=config.run.folder))
    if restart is not None:
        anew, kept = restart
        print(f"a further pass (an evaluation) starts after {kept:.2f} s with persistent workers, {anew:.2f} s without")
    print(f"\nWrite in {path.name}:\n\ndata:\n{yaml_lines(best.settings)}")


def loading_table(found: Sequence[LoaderMeasurement], consumed: float | None) -> Table:
    """Return a row for each setting, with the share that a step would wait where the pace of a run is known."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    names = ["num_workers", "prefetch_factor", "pin_memory", "samples/s", "spread", "tokens/s", "first batch"]
    for name in names if consumed is None else [*names, "a step waits"]:
        table.add_column(name, justify="right", no_wrap=True)
    for each in found:
        settings = each.settings
        waits = () if consumed is None else (f"{waiting_share(each, consumed):.1%}",)
        table.add_row(
            str(settings.num_workers),
            str(settings.prefetch_factor or "-"),
            json.dumps(settings.pin_memory),
            f"{each.samples_per_second:,.0f}",
            f"{each.spread:.0%}",
            f"{each.tokens_per_second:,.0f}",
            f"{each.first_seconds:.2f} s",
            *waits,
        )
    return table


def yaml_lines(settings: LoaderSettings) -> str:
    """Return the keys of `data:` that make these settings."""
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
    num_steps: int = _ENDLESS,
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
        num_steps=num_steps,
        section=config.data.model_copy(update=keys),
        seed=config.run.seed,
        has_partners=training_data.task.samples.has_partners,
    )


def _restarts(make_loader: Any, settings: LoaderSettings) -> tuple[float, float] | None:
    """Return how long a second pass takes to start, with new workers and with those of the first."""
    if settings.num_workers == 0:
        return None
    kept = LoaderSettings(settings.num_workers, settings.pin_memory, True, settings.prefetch_factor)
    return seconds_between_passes(make_loader, settings), seconds_between_passes(make_loader, kept)


def _reason(best: LoaderMeasurement, consumed: float | None, *, run_folder: str) -> str:
    number = best.settings.num_workers
    if consumed is None:
        return (
            f"num_workers: {number} is the smallest that loads about as fast as any. {run_folder} has no run to tell "
            "how fast the model consumes: train a few steps and ask again for an answer that knows."
        )
    return (
        f"a rank of the run in {run_folder} consumes {consumed:,.0f} tokens/s while it computes: with num_workers: "
        f"{number} a step waits {waiting_share(best, consumed):.1%} of its time"
    )


def _where(resources: MachineResources) -> str:
    device = "copied to the GPU" if resources.has_device else "no GPU"
    spread = "medians, spread is (fastest - slowest) / median"
    return f"one rank's loader alone, {resources.num_cores} cores, {device}; {spread}"


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
