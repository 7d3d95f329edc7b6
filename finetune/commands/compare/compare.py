"""`finetune compare`: to the terminal, as JSON, as a page and as PNG files."""

import time
from collections.abc import Sequence
from pathlib import Path

from finetune.commands.compare.comparison import Comparison, build_comparison
from finetune.commands.compare.tables import TIME_HEAD, print_comparison, result_rows, time_rows
from finetune.commands.printing import print_json
from finetune.report.page.charts import step_scales
from finetune.report.page.facts import format_time, format_value
from finetune.report.page.html import render_page
from finetune.report.page.page import SMOOTHING
from finetune.report.page.png import write_pngs
from finetune.runtime.files import atomic


def compare_runs(
    runs: Sequence[Path],
    *,
    html: Path | None = None,
    png: Path | None = None,
    json: bool = False,
    metric: str | None = None,
    level: float | None = None,
    price: float | None = None,
) -> None:
    """Print the comparison, and write the page and PNG files on request; with `json`, print only JSON.

    Raises UserError for a folder that is not that of a run, and for a metric that no run has.
    """
    comparison = build_comparison(runs, metric=metric, level=level, price=price)
    written = []
    if html is not None:
        write_page(comparison, html)
        written.append(f"wrote {html}")
    if png is not None:
        paths = write_pngs(comparison.charts(), png, num_runs=len(runs))
        written.append(f"wrote {len(paths)} PNG files to {png}")
    if json:
        print_json(comparison.as_json())
        return
    print_comparison(comparison)
    for line in written:
        print(line)


def write_comparison(runs: Sequence[Path], target: Path) -> None:
    """Write the page that compares the runs, whole or not at all; raises UserError as `compare_runs` does."""
    write_page(build_comparison(runs), target)


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
