"""Which loader to choose, from how fast each was and how fast the training consumes."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from finetune.advise.loading_speed import Measured
from finetune.report.jsonl import read_events
from finetune.runtime.json_files import read_json

ENOUGH = 0.02
"""Share of a step that may be spent waiting: less is not worth a process."""

AS_FAST = 0.9
"""Where nobody knows how fast the model is: a share of the fastest pace that is as good as the fastest."""

WARM_UP_STEPS = 2


def waiting_share(measured: Measured, consumed_per_second: float) -> float:
    """Return the share of a step that a rank would wait which consumes so many tokens per second of computing.

    Without workers a batch is loaded before it is computed on; with workers, while the one before it is.
    """
    loaded = measured.tokens_per_second
    if measured.settings.num_workers == 0:
        return consumed_per_second / (consumed_per_second + loaded)
    return max(0.0, 1.0 - loaded / consumed_per_second)


def choose(found: Sequence[Measured], consumed_per_second: float | None) -> Measured:
    """Return the setting with the fewest workers that is fast enough, or the fastest where none is."""
    by_cost = sorted(found, key=lambda each: (each.settings.num_workers, each.settings.prefetch_factor or 0))
    if consumed_per_second is None:
        best = max(each.tokens_per_second for each in found)
        return _fastest_of([each for each in by_cost if each.tokens_per_second >= AS_FAST * best])
    enough = [each for each in by_cost if waiting_share(each, consumed_per_second) <= ENOUGH]
    if enough:
        return _fastest_of(enough)
    return min(by_cost, key=lambda each: waiting_share(each, consumed_per_second))


def consumed_by_a_rank(run_folder: Path) -> float | None:
    """Return the tokens that one rank of the run has consumed per second of computing; None where no run tells."""
    events = run_folder / "events.jsonl"
    if not events.is_file():
        return None
    steps = [event for event in read_events(events) if event["event"] == "StepTaken"][WARM_UP_STEPS:]
    rates = [
        event["num_tokens"] / computed for event in steps if (computed := event["seconds"] - event["data_seconds"]) > 0
    ]
    return median(rates) / _world(run_folder) if rates else None


def _fastest_of(sufficient: Sequence[Measured]) -> Measured:
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
