"""The cost of interruptions, and the best interval of checkpoints: as lines, facts for status.json, and a table."""

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from finetune.report.history import RunHistory
from finetune.runtime.supervision.checkpoint_interval import IntervalAdvice, advise_interval

_LONGEST_REASON = 60


class InterruptionCosts:
    """Follows the history of a running run: keeps the status file up to date, and the lines for its end."""

    def __init__(self, write: Callable[[Mapping[str, Any]], None], *, hours_stated: float | None) -> None:
        self._write = write
        self._hours_stated = hours_stated
        self._written: Mapping[str, Any] = {}
        self.lines: tuple[str, ...] = ()

    def __call__(self, history: RunHistory) -> None:
        """Update from the current history."""
        advice = interval_advice(history, hours_stated=self._hours_stated)
        interval = (
            None
            if advice is None
            else {
                "save_seconds": round(advice.save_seconds, 3),
                "hours_between_interruptions": round(advice.hours_between_interruptions, 3),
                "is_stated": advice.is_stated,
                "every_steps": advice.every_steps,
                "best_steps": advice.best_steps,
            }
        )
        facts = {"restarts": restart_facts(history), "checkpoint_interval": interval}
        self.lines = tuple(line for line in (restart_line(history), advice_line(advice)) if line)
        if facts != self._written:
            self._written = facts
            self._write(facts)


def interval_advice(history: RunHistory, *, hours_stated: float | None) -> IntervalAdvice | None:
    """Return how often to save; None where no save or no step was measured, or no interruption observed or stated."""
    totals = history.restarts.totals()
    hours = hours_stated
    if hours is None and totals.interruptions:
        hours = (history.seconds + history.startup_seconds) / totals.interruptions / 3600
    steps = [float(event["seconds"]) for event in history.recent]
    if hours is None or not steps or not history.checkpoints:
        return None
    config = history.starts[-1].get("config") or {} if history.starts else {}
    every = (config.get("checkpoint") or {}).get("every_steps")
    return advise_interval(
        save_seconds=median(float(event["stall_seconds"]) for event in history.checkpoints),
        write_seconds=median(float(event["seconds"]) for event in history.checkpoints),
        step_seconds=median(steps),
        every_steps=every if isinstance(every, int) else None,
        hours_between_interruptions=hours,
        is_stated=hours_stated is not None,
    )


def stated_hours(history: RunHistory) -> float | None:
    """Return `run.hours_between_interruptions` of the last start's config."""
    config = history.starts[-1].get("config") or {} if history.starts else {}
    hours = (config.get("run") or {}).get("hours_between_interruptions")
    return float(hours) if isinstance(hours, int | float) else None


def restart_facts(history: RunHistory) -> dict[str, Any]:
    """Return the sums as plain values."""
    totals = history.restarts.totals()
    return {
        "restarts": totals.restarts,
        "interruptions": totals.interruptions,
        "steps_redone": totals.steps_redone,
        "lost_seconds": round(totals.lost_seconds, 1),
        "down_seconds": round(totals.down_seconds, 1),
        "startup_seconds": round(totals.startup_seconds, 1),
        "redone_seconds": round(totals.redone_seconds, 1),
        "usd": None if totals.usd is None else round(totals.usd, 4),
        "price": history.restarts.price_source or None,
    }


def restart_line(history: RunHistory) -> str:
    """Return the cost of restarts in one line; empty if there were none."""
    totals = history.restarts.totals()
    if not totals.restarts:
        return ""
    parts = (
        f"{totals.down_seconds / 60:.1f} waiting",
        f"{totals.startup_seconds / 60:.1f} start-up",
        f"{totals.redone_seconds / 60:.1f} for {totals.steps_redone:,} repeated steps",
    )
    usd = "" if totals.usd is None else f"; about ${totals.usd:,.2f} ({history.restarts.price_source})"
    count = f"{totals.restarts:,} restart{'s' * (totals.restarts > 1)}"
    return f"{count}: {totals.lost_seconds / 60:.1f} min lost = {' + '.join(parts)}{usd}"


def advice_line(advice: IntervalAdvice | None) -> str:
    """Return the advice in one line; empty if there is none."""
    if advice is None:
        return ""
    source = "stated" if advice.is_stated else "observed"
    hours = advice.hours_between_interruptions
    every = f"an interruption every {f'{hours * 60:.3g} min' if hours < 1 else f'{hours:.3g} h'} ({source})"
    cost = f"a save costs {advice.save_seconds:.2g} s"
    if advice.is_right:
        return f"{cost}; with {every}, checkpoint.every_steps: {advice.every_steps} is right"
    best = f"with {every}, save every {advice.best_steps:,} steps"
    then = _minutes(advice.lost_seconds(advice.best_steps))
    if advice.every_steps is None:
        now = f"now only at the end: an interruption loses everything, then {then}"
    elif advice.every_steps > advice.best_steps:
        lost = f"an interruption loses {_minutes(advice.lost_seconds(advice.every_steps))} of steps on average"
        now = f"now {advice.every_steps:,}: {lost}, then {then}"
    else:
        shares = (advice.save_share(advice.every_steps), advice.save_share(advice.best_steps))
        now = f"now {advice.every_steps:,}: saving adds {shares[0]:.1%}, then {shares[1]:.1%}"
    return f"{cost}; {best} ({now})"


def restart_rows(history: RunHistory) -> list[list[str]]:
    """Return a table: a row of names, then one for each restart, and their sums."""
    totals = history.restarts.totals()
    if not totals.restarts:
        return []
    head = ["start, after", "resumed from step", "steps again", "waiting", "start-up", "steps again took"]
    rows = []
    for restart in history.restarts.recent:
        reason = restart.reason if len(restart.reason) <= _LONGEST_REASON else f"{restart.reason[:_LONGEST_REASON]}..."
        times = map(_minutes, (restart.down_seconds, restart.startup_seconds, restart.redone_seconds))
        rows.append([f"{restart.number:,}, {reason}", f"{restart.step:,}", f"{restart.steps_redone:,}", *times])
    total = [
        *(f"all, {totals.interruptions:,} of them interruptions", "", f"{totals.steps_redone:,}"),
        *map(_minutes, (totals.down_seconds, totals.startup_seconds, totals.redone_seconds)),
    ]
    if totals.usd is None:
        return [head, *rows, total]
    paid = [*("-" if restart.usd is None else f"${restart.usd:,.2f}" for restart in history.restarts.recent)]
    return [
        [*head, "cost"],
        *([*row, usd] for row, usd in zip(rows, paid, strict=True)),
        [*total, f"${totals.usd:,.2f}"],
    ]


def _minutes(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:,.1f} min"
