"""The texts and tables of a page, from the history of a run and the other files in its folder.

With them belong the cost of interruptions and the best interval of checkpoints, also as facts for status.json.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, TypeAdapter

from finetune.registry.tasks import METRICS
from finetune.report.history import RunHistory
from finetune.runtime.files.read import parse_as, read_regular
from finetune.runtime.resources import format_size
from finetune.runtime.supervision.checkpoint_interval import IntervalAdvice, advise_interval
from finetune.runtime.text.redact import redact_foreign

SOURCE_MARK = "  # "
"""Between value and source in resolved.yaml."""

_TABLE_BYTES = 16 << 20
STALE_SECONDS = 120.0


class AuditCounts(BaseModel):
    """Counts of a source in audit.json."""

    rows: int = 0
    samples: int = 0
    tokens: int = 0
    targets: int = 0
    truncated_rows: int = 0
    long_rows: int = 0
    rows_without_target: int = 0
    longest: int = 0  # in tokens


class AuditedSource(BaseModel):
    """A source of rows in audit.json."""

    key: str = ""
    counts: AuditCounts = AuditCounts()
    duplicates: int | None = None


class AuditSummary(BaseModel):
    """The part of audit.json that the page shows."""

    sources: tuple[AuditedSource, ...] = ()
    validation: AuditedSource | None = None


@dataclass(frozen=True)
class RunFiles:
    """The contents of the files next to events.jsonl; `missing` names missing and damaged files."""

    status: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    audit: AuditSummary = field(default_factory=AuditSummary)
    config: str = ""  # resolved.yaml
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tile:
    """A headline figure."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class ConfigLine:
    """A line of resolved.yaml."""

    text: str
    source: str
    is_set: bool  # by the user


def read_run_files(folder: Path) -> RunFiles:
    """Return the contents of the files that exist."""
    values: dict[str, Any] = {}
    missing = []
    for name, file in (("status", "status.json"), ("environment", "environment.json"), ("audit", "audit.json")):
        try:
            values[name] = parse_as(_OBJECTS[name], read_regular(folder / file, max_bytes=_TABLE_BYTES))
        except (OSError, ValueError):
            missing.append(file)
    try:
        text = read_regular(folder / "resolved.yaml", max_bytes=_TABLE_BYTES)
        values["config"] = redact_foreign(text.decode("utf-8", errors="replace"))
    except OSError:
        missing.append("resolved.yaml")
    return RunFiles(**values, missing=tuple(missing))


_OBJECTS: Mapping[str, TypeAdapter[Any]] = {
    "status": TypeAdapter(dict[str, Any]),
    "environment": TypeAdapter(dict[str, Any]),
    "audit": TypeAdapter(AuditSummary),
}


def run_state(history: RunHistory, status: Mapping[str, Any], *, now: float) -> tuple[str, str]:
    """Return the state of the run (`finished`, `running`, `failed`, ...) and a sentence about it.

    A killed run still has the state `running`, which therefore counts only while its files are written.
    """
    if history.ended is not None:
        reason = str(history.ended["reason"])
        is_final = history.ended.get("final_folder") is not None
        return ("finished" if is_final else "stopped", reason)
    state = str(status.get("state", "unknown"))
    if state == "failed":
        error = status["error"] if isinstance(status.get("error"), Mapping) else {}
        return "failed", f"rank {error.get('rank')}: {error.get('type')}: {error.get('message')}"
    seen = max(history.updated, status["time"] if isinstance(status.get("time"), float) else 0.0)
    if state in ("running", "starting") and now - seen > STALE_SECONDS:
        return "silent", f"no event for {format_duration(now - seen)}: the run was killed, or it hangs"
    return state, str(status.get("reason") or "")


def tiles(history: RunHistory) -> Iterator[Tile]:
    """Yield the headline figures."""
    planned = f"of {history.num_steps:,}" if history.num_steps else ""
    yield Tile("steps", f"{history.step:,}", planned)
    losses = [loss for event in list(history.recent)[-10:] if isinstance(loss := event["loss"], int | float)]
    if losses:
        yield Tile("training loss", f"{sum(losses) / len(losses):.4f}", f"mean of the last {len(losses)} steps")
    names = [name for name in history.curves if name.startswith("evaluation/")]
    for name in sorted(names, key=lambda name: (name != "evaluation/loss", name)):
        points = history.curves[name].points()
        if not len(points.values):
            continue
        metric, is_low = name.partition("/")[2], is_lower_better(name)
        best = int(points.values.argmin() if is_low else points.values.argmax())
        word = "lowest" if is_low else "highest"
        note = f"{word} {format_metric(points.values[best])} at step {points.steps[best]:,.0f}"
        yield Tile(f"evaluation {metric}", format_metric(points.values[-1]), note)
    yield Tile(
        "training time", format_duration(history.seconds), f"start-up {format_duration(history.startup_seconds)}"
    )
    recent = [event for event in history.recent if float(event["seconds"]) > 0]
    if recent:
        rates = sorted(float(event["num_tokens"]) / float(event["seconds"]) for event in recent)
        yield Tile(
            f"{history.unit} per second", f"{rates[len(rates) // 2]:,.0f}", f"median of the last {len(rates)} steps"
        )
    yield Tile(history.unit, format_count(history.tokens), "without padding" if history.unit == "tokens" else "")
    if "mfu" in history.curves and len(means := history.curves["mfu"].points().means):
        yield Tile("MFU", f"{means[-1]:.1%}", "of the devices' peak")
    if "memory_bytes" in history.curves and len(peaks := history.curves["memory_bytes"].points().values):
        yield Tile("peak memory", format_size(int(peaks.max())), "of rank 0")
    counts = {"resume": max(len(history.starts) - 1, 0), "skipped step": history.num_skipped}
    notes = [f"{count:,} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items()]
    warnings = sum(message.is_warning for message in history.messages.values())
    yield Tile("warnings", f"{warnings:,}", "; ".join(notes if history.num_skipped else notes[:1]))


def is_lower_better(metric: str) -> bool:
    """Return whether smaller values of the metric are better: as it is registered, else by its name."""
    name = re.split("[/:]", metric)[-1]
    return METRICS[name].goal == "minimize" if name in METRICS else any(word in name for word in ("loss", "error"))


def config_lines(text: str) -> list[ConfigLine]:
    """Return the lines of resolved.yaml, split into value and source."""
    rows = []
    for line in text.splitlines():
        if line.startswith("# "):  # the first line, about the file
            continue
        value, mark, source = line.rpartition(SOURCE_MARK)
        is_comment = line.lstrip().startswith("#")
        value, source = (value.rstrip(), source) if mark and not is_comment else (line, "")
        rows.append(ConfigLine(value, source, is_set=bool(source) and source != "default"))
    return rows


def audit_summary_rows(audit: AuditSummary) -> list[list[str]]:
    """Return the table of the data: a row of names, then a row for each source and the validation data."""
    columns = {"rows": "rows", "samples": "samples", "tokens": "tokens", "targets": "targets"}
    more = {"truncated_rows": "cut", "long_rows": "too long", "rows_without_target": "no target", "longest": "longest"}
    sources = [*audit.sources, *([audit.validation] if audit.validation else ())]
    shown = columns | {
        key: name for key, name in more.items() if any(getattr(source.counts, key) for source in sources)
    }
    head = ["source", *shown.values(), "duplicates"]
    rows = []
    for source in sources:
        counts = [f"{getattr(source.counts, name):,}" for name in shown]
        rows.append([source.key, *counts, "" if source.duplicates is None else f"{source.duplicates:,}"])
    return [head, *rows] if rows else []


def phase_rows(profiles: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the profiled windows: each phase with its seconds per step and its share of the wall time."""
    rows = []
    for profile in profiles:
        wall, steps = float(profile["wall_seconds"]), int(profile["num_steps"])
        phases = [
            {
                "name": name,
                "milliseconds": 1000 * seconds / max(steps, 1),
                "percent": 100 * seconds / wall if wall else 0,
            }
            for name, seconds in sorted(profile["seconds"].items(), key=lambda item: -item[1])
            if seconds > 0
        ]
        first = int(profile["first_step"])
        rows.append(
            {"first": first, "last": first + steps - 1, "phases": phases, "milliseconds": 1000 * wall / max(steps, 1)}
            | {"trace": str(profile.get("trace") or "")}
        )
    return rows


def format_metric(value: float) -> str:
    """Return a metric with four digits after the point; more if it is small."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.001 else f"{value:.3e}"


def format_count(count: float) -> str:
    """Return a large count in a few characters.

    >>> format_count(1_234_567)
    '1.23 M'
    """
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if count >= size:
            return f"{count / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{count:,.0f}"


def format_duration(seconds: float) -> str:
    """Return the two largest of days, hours, minutes and seconds; `?` if not finite.

    >>> format_duration(3723)
    '1 h 2 min'
    """
    if not math.isfinite(seconds):
        return "?"
    rest = round(seconds)
    if rest < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{rest} s"
    parts = [(rest // 86400, "d"), (rest // 3600 % 24, "h"), (rest // 60 % 60, "min"), (rest % 60, "s")]
    first = next(index for index, (number, _) in enumerate(parts) if number)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2])


def format_time(seconds: float) -> str:
    """Return a time of day, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def fact_text(value: Any) -> str:
    """Return a fact of the environment as text without secrets; empty if it is absent."""
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {fact_text(item)}" for name, item in value.items() if item not in (None, "", {}, []))
    if isinstance(value, list):
        if all(isinstance(item, str | int | float) for item in value):
            return redact_foreign(" ".join(map(str, value)))
        lines = [
            ", ".join(f"{name} {each}" for name, each in item.items()) if isinstance(item, Mapping) else str(item)
            for item in value
        ]
        return "\n".join(map(redact_foreign, lines))
    return "" if value is None else redact_foreign(str(value))


_LONGEST_REASON, _SHOWN_RESTARTS = 60, 100


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


def restart_facts(history: RunHistory) -> dict[str, Any]:
    """Return the sums as plain values."""
    totals = history.restarts.totals()
    counts = {name: getattr(totals, name) for name in ("restarts", "interruptions", "steps_redone")}
    names = ("lost_seconds", "down_seconds", "startup_seconds", "redone_seconds")
    return {
        **counts,
        **{name: round(getattr(totals, name), 1) for name in names},
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
    shown = history.restarts.listed[-_SHOWN_RESTARTS:]
    head = ["start, after", "resumed from step", "steps again", "waiting", "start-up", "steps again took"]
    rows = []
    for restart in shown:
        reason = restart.reason if len(restart.reason) <= _LONGEST_REASON else f"{restart.reason[:_LONGEST_REASON]}..."
        times = map(_minutes, (restart.down_seconds, restart.startup_seconds, restart.redone_seconds))
        rows.append([f"{restart.number:,}, {reason}", f"{restart.step:,}", f"{restart.steps_redone:,}", *times])
    total = [
        *(f"all, {totals.interruptions:,} of them interruptions", "", f"{totals.steps_redone:,}"),
        *map(_minutes, (totals.down_seconds, totals.startup_seconds, totals.redone_seconds)),
    ]
    if totals.usd is None:
        return [head, *rows, total]
    paid = [*("-" if restart.usd is None else f"${restart.usd:,.2f}" for restart in shown)]
    return [
        [*head, "cost"],
        *([*row, usd] for row, usd in zip(rows, paid, strict=True)),
        [*total, f"${totals.usd:,.2f}"],
    ]


def _minutes(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:,.1f} min"
