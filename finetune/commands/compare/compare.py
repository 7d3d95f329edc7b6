"""`finetune compare`: prints the comparison as tables or JSON, and writes it as a page and PNG files."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from finetune.commands.compare.comparison import Comparison, build_comparison
from finetune.commands.compare.differences import Difference
from finetune.commands.compare.time_to_metric import TimeToMetric
from finetune.commands.printing import print_facts, print_json, print_table
from finetune.report.page.charts import step_scales, write_pngs
from finetune.report.page.facts import format_count, format_duration, format_time, format_value
from finetune.report.page.page import SMOOTHING, render_page
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
"""Runs that are shown as columns; more are shown as rows."""


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


def print_comparison(comparison: Comparison) -> None:
    """Print results, agreement, the time to the level, and differences of config and environment."""
    names = [run.name for run in comparison.runs]
    missing = ("missing files", *(", ".join(result.missing) for result in comparison.results))
    _print_table(["", *names], [*result_rows(comparison), *([missing] if any(missing[1:]) else [])])
    for name, agreement in zip(names[1:], comparison.agreements, strict=True):
        order = "the same" if agreement.has_same_samples else "not known in full"
        if agreement.order_differs_at is not None:
            order = f"differs from step {agreement.order_differs_at:,} on"
        text = f"{agreement.verdict}: {agreement.sentence}. Sample order: {order}."
        print_facts([(name, text)], indent=len(name) + 2)
    times = comparison.time_to_metric
    if times is not None:
        print(f"\nfirst at {times.metric} {format_value(times.level)} or better")
        _print_table(TIME_HEAD, time_rows(times))
    for title, rows in (("config", comparison.config), ("environment", comparison.environment)):
        _print_differences(title, rows, names)


TIME_HEAD = ("run", "processes", "step", "tokens", "time", "cost", "speed-up", "efficiency")


def time_rows(times: TimeToMetric) -> Iterator[tuple[str, ...]]:
    """Yield a row of texts for each run."""
    for run in times.reached:
        cells = ("never", "", "", "", "", "")
        if run.step is not None:
            cells = (
                f"{run.step:,}",
                format_count(run.tokens or 0),
                format_duration(run.seconds or 0),
                _cost(run.cost),
                "" if run.speedup is None else f"{run.speedup:.2f}x",
                "" if run.efficiency is None else f"{run.efficiency:.0%}",
            )
        yield run.run, str(run.num_processes), *cells


def result_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the results as rows: a name, then a text for each run."""
    results = comparison.results
    rows = [
        ("state", *(result.state for result in results)),
        ("processes", *(str(result.num_processes) for result in results)),
        ("steps", *(f"{result.steps:,}" for result in results)),
        ("tokens", *(format_count(result.tokens) for result in results)),
        ("training time", *(format_duration(result.seconds) for result in results)),
        ("training loss", *(_value(result.training_loss) for result in results)),
    ]
    if comparison.price is not None:
        rows.append(("cost", *(_cost(result.cost) for result in results)))
    for metric in comparison.metrics:
        rows.append((f"{metric}, last", *(_value(result.last.get(metric)) for result in results)))
        rows.append((f"{metric}, best", *(_value(result.best.get(metric)) for result in results)))
    return rows


def _print_differences(title: str, rows: Sequence[Difference], names: Sequence[str]) -> None:
    if not rows:
        print(f"\n{title}: no difference")
        return
    print(f"\n{title}: differences")
    indent = max(len(name) for name in names) + 4
    for row in rows:
        print(row.key)
        print_facts([(f"  {name}", value) for name, value in zip(names, row.values, strict=True)], indent=indent)


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]] | Iterator[tuple[str, ...]]) -> None:
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    print_table(table)


def _value(value: float | None) -> str:
    return "" if value is None else format_value(value)


def _cost(cost: float | None) -> str:
    return "" if cost is None else f"${cost:,.2f}" if cost >= 0.1 else f"${cost:.4f}"
