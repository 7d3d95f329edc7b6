"""The table of a window: the time of each phase per step on the main rank, and its spread over the ranks."""

from collections.abc import Mapping, Sequence
from statistics import median

from finetune.report.events import Profiled
from finetune.report.profile.phases import COMMUNICATION, PHASES
from finetune.report.profile.trace import PhaseSeconds

WALL, OVERLAPPED, BUSY = "wall", "overlapped", "busy"
"""Rows in addition to the phases; `busy` is the wall time without communication and without waits for slower ranks."""


def spread_over_ranks(ranks: Sequence[PhaseSeconds]) -> dict[str, dict[str, float]]:
    """Return min, median and max seconds of every phase and of the wall time, and the slowest rank."""
    rows = {}
    for name in (*PHASES, OVERLAPPED, BUSY, WALL):
        values = [_value(rank, name) for rank in ranks]
        slowest = max(range(len(values)), key=values.__getitem__)
        rows[name] = {
            "min": min(values),
            "median": median(values),
            "max": values[slowest],
            "slowest_rank": float(slowest),
        }
    return rows


def format_profile(event: Profiled) -> tuple[str, ...]:
    """Return the table, in milliseconds per step.

    The phases add up to the last row in the column of this rank, but not in those of the spread.
    """
    shown = {**event.seconds, WALL: event.wall_seconds}
    last = event.first_step + event.num_steps - 1
    lines = [
        f"profile of steps {event.first_step} to {last}, ms per step (rank 0; then all ranks)",
        f"  {'phase':<14}{'rank 0':>10}{'share':>8}{'min':>10}{'median':>10}{'max':>10}  slowest",
    ]
    for name, seconds in shown.items():
        row = event.ranks.get(name, {})
        numbers = [seconds, *(row.get(column, seconds) for column in ("min", "median", "max"))]
        own, *others = (f"{1000 * number / max(1, event.num_steps):>10.2f}" for number in numbers)
        share = seconds / event.wall_seconds if event.wall_seconds else 0.0
        lines.append(f"  {name:<14}{own}{share:>8.1%}{''.join(others)}  rank {row.get('slowest_rank', 0):.0f}")
    hidden = 1000 * event.overlapped_seconds / max(1, event.num_steps)
    lines.append(f"  {COMMUNICATION}: exposed; another {hidden:.2f} ms overlaps with computation")
    busy = event.ranks.get(BUSY, {"min": 0.0, "max": 0.0})
    if busy["min"] < busy["max"]:
        most, median = (1000 * busy[name] / max(1, event.num_steps) for name in ("max", "median"))
        rank = f"{busy['slowest_rank']:.0f}"
        lines.append(f"  slowest: rank {rank}, {most:.2f} ms a step outside communication, median {median:.2f}")
    return (*lines, *([f"  trace {event.trace}"] if event.trace else []))


def _value(of_rank: PhaseSeconds, name: str) -> float:
    busy = of_rank.wall - of_rank.seconds[COMMUNICATION]
    others: Mapping[str, float] = {WALL: of_rank.wall, OVERLAPPED: of_rank.overlapped, BUSY: busy}
    return others[name] if name in others else of_rank.seconds[name]
