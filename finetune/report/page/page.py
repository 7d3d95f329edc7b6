"""report.html of a run: what it says now."""

import time
from pathlib import Path

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
from finetune.report.page.history import RunHistory
from finetune.report.page.html import TEMPLATES, render_page
from finetune.runtime.files import atomic

REPORT_FILE = "report.html"
SHOWN_CHECKPOINTS = 12

SMOOTHING = 0.6
"""Where the slider stands when a page is opened."""


def report_page(folder: Path, history: RunHistory, *, price: float | None = None, now: float | None = None) -> str:
    """Return the page of the run in the folder; `price` is that of a device for an hour, in USD."""
    now = time.time() if now is None else now
    files = read_run_files(folder)
    state, sentence = run_state(history, files.status, now=now)
    start = history.starts[-1] if history.starts else {}
    return render_page(
        "report.html.jinja",
        folder=TEMPLATES,
        data={
            "charts": charts_of(history),
            "runs": [{"name": folder.name, "scales": step_scales(history), "color": 0}],
            "skipped": [event["step"] for event in history.skipped],
            "resumed": [event["step"] for event in history.starts[1:]],
            "price": price,
        },
        title=folder.resolve().name,
        state=state,
        sentence=sentence,
        subtitle=[start.get("strategy", ""), f"page written {format_time(now)}"],
        arithmetic=start.get("arithmetic", ()),
        tiles=list(tiles(history)),
        device_hours=history.device_seconds / 3600,
        price=price,
        smoothing=SMOOTHING,
        phases=phase_rows(history.profiles),
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
        missing=files.missing,
        duration=format_duration,
    )


def write_report(folder: Path, history: RunHistory, *, price: float | None = None) -> Path:
    """Write the page into the folder, whole or not at all, and return its path; it can always be made again."""
    path = folder / REPORT_FILE
    page = report_page(folder, history, price=price)
    atomic.write_bytes(path, page.encode("utf-8", errors="backslashreplace"), survives_power_cut=False)
    return path
