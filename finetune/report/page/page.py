"""Renders report.html from the current history of a run."""

import time
from pathlib import Path
from typing import Any

from finetune.report.history import RunHistory
from finetune.report.page.charts import charts_of, step_scales
from finetune.report.page.facts import (
    audit_rows,
    config_lines,
    environment_rows,
    format_duration,
    format_time,
    phase_rows,
    read_run_files,
    run_state,
    tiles,
)
from finetune.report.page.html import TEMPLATES, render_page
from finetune.report.page.interruptions import advice_line, interval_advice, restart_rows, stated_hours
from finetune.runtime.files import atomic

REPORT_FILE = "report.html"
SHOWN_CHECKPOINTS = 12

SMOOTHING = 0.6
"""Initial position of the smoothing slider."""


RELOAD_SECONDS = 30
"""Interval at which an open page of a running run reloads; it is also written at this interval."""


def report_page(folder: Path, history: RunHistory, *, price: float | None = None, now: float | None = None) -> str:
    """Return the page of the run in the folder; `price` is in USD per device hour."""
    now = time.time() if now is None else now
    if price is not None:
        history.restarts.set_price(price, source="--price")
    files = read_run_files(folder)
    state, sentence = run_state(history, files.status, now=now)
    start = history.starts[-1] if history.starts else {}
    return render_page(
        "report.html.jinja",
        folder=TEMPLATES,
        data=_chart_data(folder.name, history, price=price),
        title=folder.resolve().name,
        unit=history.unit,
        state=state,
        sentence=sentence,
        subtitle=[start.get("strategy", ""), f"page written {format_time(now)}"],
        arithmetic=start.get("arithmetic", ()),
        tiles=list(tiles(history)),
        device_hours=history.device_seconds / 3600,
        price=price,
        smoothing=SMOOTHING,
        reload_seconds=RELOAD_SECONDS if state in ("starting", "running") else None,
        phases=phase_rows(history.profiles),
        restarts=restart_rows(history),
        restart_note=_restart_note(history),
        advice=advice_line(interval_advice(history, hours_stated=stated_hours(history))),
        checkpoints=list(history.checkpoints)[-SHOWN_CHECKPOINTS:],
        skipped=list(history.skipped),
        num_skipped=history.num_skipped,
        answers=list(history.answers.values()),
        num_prompts_left_out=history.num_prompts_left_out,
        messages=list(history.messages.values()),
        startup=(history.startup or {}).get("seconds", {}),
        audit=audit_rows(files.audit),
        environment=environment_rows(files.environment),
        config=config_lines(files.config),
        missing=(*files.missing, *history.damaged),
        duration=format_duration,
    )


def write_report(folder: Path, history: RunHistory, *, price: float | None = None) -> Path:
    """Write the page into the folder atomically, and return its path."""
    path = folder / REPORT_FILE
    page = report_page(folder, history, price=price)
    atomic.write_bytes(path, page.encode("utf-8", errors="backslashreplace"), survives_power_cut=False)
    return path


def _restart_note(history: RunHistory) -> str:
    """Return how the cost of restarts was counted."""
    source = history.restarts.price_source
    price = f" Cost: start-up and repeated steps, by the price of {source}." if source else ""
    return f"Waiting is the time in which no process of the run existed.{price}"


def _chart_data(name: str, history: RunHistory, *, price: float | None) -> dict[str, Any]:
    return {
        "charts": charts_of(history),
        "runs": [{"name": name, "scales": step_scales(history), "color": 0}],
        "skipped": [event["step"] for event in history.skipped],
        "resumed": [event["step"] for event in history.starts[1:]],
        "price": price,
        "reload_seconds": RELOAD_SECONDS,
        "unit": history.unit,
    }
