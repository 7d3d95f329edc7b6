"""`finetune doctor --data`: the loader alone, measured with other numbers of workers, and what to write in the job."""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from finetune.advise.loading_advice import choose, consumed_by_a_rank, waiting_share
from finetune.advise.loading_speed import Measured, measure, seconds_between_passes, settings_to_try
from finetune.advise.printing import print_table
from finetune.config.load import load_config
from finetune.config.run_config import RunConfig
from finetune.data.loader import train_loader
from finetune.data.workers import LoaderSettings, Room, this_room
from finetune.report.announcer import Announcer
from finetune.run.lessons import Lessons, make_lessons
from finetune.runtime.log import quieten

_ENDLESS = 1 << 40
"""Steps of a loader of which only the first are taken."""


def examine_loading(path: Path, overrides: Sequence[str], *, num_rounds: int, seconds: float) -> None:
    """Print samples and tokens per second of the job's loader for each setting worth a try, and what to write.

    Tokenises first, as training would. Where the job's run folder has events of an earlier run, the answer counts on
    how fast that one consumed. Raises ConfigError and DataError as training does.
    """
    quieten(is_main=True)
    config = load_config(path, overrides).config
    lessons, room = make_lessons(config, Announcer(is_main=True)), this_room()
    make_loader = partial(_loader, config, lessons)
    tried = settings_to_try(room)
    found = measure(make_loader, tried, num_rounds=num_rounds, seconds=seconds, say=_tell)
    consumed = consumed_by_a_rank(Path(config.run.folder))
    print(_where(room))
    print_table(loading_table(found, consumed))
    best = choose(found, consumed)
    restart = _restarts(make_loader, best.settings)
    print(_reason(best, consumed, run_folder=config.run.folder))
    if restart is not None:
        anew, kept = restart
        print(f"a further pass (an evaluation) starts after {kept:.2f} s with persistent workers, {anew:.2f} s without")
    print(f"\nWrite in {path.name}:\n\ndata:\n{yaml_lines(best.settings)}")


def loading_table(found: Sequence[Measured], consumed: float | None) -> Table:
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
    config: RunConfig, lessons: Lessons, settings: LoaderSettings, *, first_step: int, num_steps: int = _ENDLESS
) -> Any:
    keys = {
        "num_workers": settings.num_workers,
        "pin_memory": settings.pin_memory,
        "persistent_workers": settings.persistent_workers,
        "prefetch_factor": settings.prefetch_factor,
    }
    return train_loader(
        lessons.training,
        lessons.task.collate,
        global_batch_size=config.train.global_batch_size,
        microbatch_size=config.train.microbatch_size,
        first_step=first_step,
        num_steps=num_steps,
        section=config.data.model_copy(update=keys),
        seed=config.run.seed,
        has_partners=lessons.task.has_partners,
    )


def _restarts(make_loader: Any, settings: LoaderSettings) -> tuple[float, float] | None:
    """Return how long a second pass takes to start, with new workers and with those of the first."""
    if settings.num_workers == 0:
        return None
    kept = LoaderSettings(settings.num_workers, settings.pin_memory, True, settings.prefetch_factor)
    return seconds_between_passes(make_loader, settings), seconds_between_passes(make_loader, kept)


def _reason(best: Measured, consumed: float | None, *, run_folder: str) -> str:
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


def _where(room: Room) -> str:
    device = "copied to the GPU" if room.has_device else "no GPU"
    return f"one rank's loader alone, {room.num_cores} cores, {device}; medians, spread is (fastest - slowest) / median"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
