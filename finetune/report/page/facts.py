"""The texts and tables of a page, from the history of a run and the other files in its folder.

The cost of interruptions and the best interval of checkpoints are also facts for status.json.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, TypeAdapter

from finetune.registry.tasks import METRICS
from finetune.report.history import RunHistory
from finetune.runtime.files.read import parse_as, read_regular
from finetune.runtime.supervision.checkpoint_interval import IntervalAdvice, advise_interval
from finetune.runtime.text.redact import redact_foreign

SOURCE_MARK = "  # "
"""Between value and source in resolved.yaml."""

_TABLE_BYTES = 16 << 20
STALE_SECONDS = 120.0


class AuditCounts(BaseModel):
    """Counts of a source in audit.json, in the order of the page's table."""

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

    def rows(self) -> list[list[str]]:
        """Return a table: a row of names, then one for each source and the validation data; empty without any."""
        sources = [*self.sources, *([self.validation] if self.validation else ())]
        head = ["source", *(name.replace("_", " ") for name in AuditCounts.model_fields), "duplicates"]
        table = [
            [source.key, *(f"{count:,}" for _, count in source.counts), str(source.duplicates or "")]
            for source in sources
        ]
        return [head, *table] if table else []


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
    yield Tile("device hours", f"{history.device_seconds / 3600:.3g}", "in steps, evaluations and waiting for saves")
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
        interval: dict[str, Any] | None = None
        if advice is not None:
            values = {name: value for name, value in asdict(advice).items() if name != "step_seconds"}
            interval = {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}
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
    sums = {**asdict(totals), "lost_seconds": totals.lost_seconds}
    rounded = {name: round(value, 1) if isinstance(value, float) else value for name, value in sums.items()}
    usd = None if totals.usd is None else round(totals.usd, 4)
    return {**rounded, "usd": usd, "price": history.restarts.price_source or None}


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
    hours, best, every = advice.hours_between_interruptions, advice.best_steps, advice.every_steps
    interval = f"{hours * 60:.3g} min" if hours < 1 else f"{hours:.3g} h"
    measured = (
        f"a save costs {advice.save_seconds:.2g} s; with an interruption every {interval} "
        f"({'stated' if advice.is_stated else 'observed'})"
    )
    if advice.is_right:
        return f"{measured}, checkpoint.every_steps: {every} is right"
    now = "only at the end" if every is None else f"{every:,}"
    lost = _minutes(advice.lost_seconds(best))
    return (
        f"{measured}, save every {best:,} steps (now {now}): saving then adds {advice.save_share(best):.1%}, an "
        f"interruption loses {lost} of steps on average"
    )


def _minutes(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:,.1f} min"
