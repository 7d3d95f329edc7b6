"""A comparison as one page that needs no network."""

import time
from pathlib import Path

from finetune.commands.compare.comparison import Comparison
from finetune.commands.compare.tables import TIME_HEAD, result_rows, time_rows
from finetune.report.page.charts import step_scales
from finetune.report.page.facts import format_time, format_value
from finetune.report.page.html import render_page
from finetune.report.page.page import SMOOTHING
from finetune.runtime.files import atomic

TEMPLATES = Path(__file__).parent / "templates"
MAX_COLUMNS = 5
"""Of runs side by side; more are rows."""


def write_page(comparison: Comparison, target: Path) -> None:
    """Write the page, whole or not at all."""
    atomic.write_bytes(target, comparison_page(comparison).encode("utf-8", errors="backslashreplace"))


def comparison_page(comparison: Comparison) -> str:
    """Return the page."""
    runs, times = comparison.runs, comparison.time_to_metric
    results = [("run", *(run.name for run in runs)), *result_rows(comparison)]
    return render_page(
        "compare.html.jinja",
        folder=TEMPLATES,
        data={
            "charts": comparison.charts(),
            "unit": runs[0].history.unit,
            "runs": [
                {"name": run.name, "color": number, "scales": step_scales(run.history)}
                for number, run in enumerate(runs)
            ],
        },
        title=" · ".join(run.name for run in runs) if len(runs) <= 3 else f"{len(runs)} runs",
        unit=runs[0].history.unit,
        written=format_time(time.time()),
        comparison=comparison,
        results=results if len(runs) <= MAX_COLUMNS else list(zip(*results, strict=True)),
        missing=[
            f"{result.run}: not found or damaged: {', '.join(result.missing)}"
            for result in comparison.results
            if result.missing
        ],
        others=list(zip(runs[1:], comparison.agreements, strict=True)),
        times=[TIME_HEAD, *time_rows(times)] if times else [],
        metric=times.metric if times else "",
        level=format_value(times.level) if times else "",
        price=comparison.price,
        smoothing=SMOOTHING,
        reload_seconds=None,
    )
