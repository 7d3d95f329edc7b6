"""A comparison in a terminal."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from finetune.commands.compare.comparison import Comparison
from finetune.commands.compare.differences import Difference
from finetune.commands.compare.time_to_metric import TimeToMetric
from finetune.commands.printing import print_facts, print_table
from finetune.report.page.facts import format_count, format_duration, format_value


def print_comparison(comparison: Comparison) -> None:
    """Print results, agreement, the time to the level, and what differs."""
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
    for time in times.reached:
        cells = ("never", "", "", "", "", "")
        if time.step is not None:
            cells = (
                f"{time.step:,}",
                format_count(time.tokens or 0),
                format_duration(time.seconds or 0),
                _cost(time.cost),
                "" if time.speedup is None else f"{time.speedup:.2f}x",
                "" if time.efficiency is None else f"{time.efficiency:.0%}",
            )
        yield time.run, str(time.num_processes), *cells


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
    print(f"\n{title}: what differs")
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
