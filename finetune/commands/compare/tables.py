"""A comparison in a terminal."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from finetune.commands.compare.comparison import Comparison
from finetune.commands.compare.differences import Difference
from finetune.commands.compare.levels import Levels, Reached
from finetune.commands.printing import print_facts, print_table
from finetune.report.page.facts import format_count, format_duration, format_value


def print_comparison(comparison: Comparison) -> None:
    """Print results, agreement, the time to the level, and what differs."""
    names = [run.name for run in comparison.runs]
    _print_table(["", *names], result_rows(comparison))
    for name, each in zip(names[1:], comparison.agreements, strict=True):
        order = "the same" if each.has_same_samples else "not known in full"
        if each.order_differs_at is not None:
            order = f"differs from step {each.order_differs_at:,} on"
        print_facts([(f"{name}", f"{each.verdict}: {each.sentence}. Sample order: {order}.")], indent=len(name) + 2)
    if comparison.levels is not None:
        print(f"\nfirst at {comparison.levels.metric} {format_value(comparison.levels.level)} or better")
        _print_table(LEVEL_HEAD, level_rows(comparison.levels))
    for title, rows in (("config", comparison.config), ("environment", comparison.environment)):
        _print_differences(title, rows, names)


LEVEL_HEAD = ("run", "processes", "step", "tokens", "time", "cost", "speed-up", "efficiency")


def level_rows(levels: Levels) -> Iterator[tuple[str, ...]]:
    """Yield a row of texts for each run."""
    for each in levels.reached:
        yield each.run, str(each.num_processes), *_reached_cells(each)


def result_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the results as rows: what it is, then a text for each run."""
    results = comparison.results
    rows = [
        ("state", *(each.state for each in results)),
        ("processes", *(str(each.num_processes) for each in results)),
        ("steps", *(f"{each.steps:,}" for each in results)),
        ("tokens", *(format_count(each.tokens) for each in results)),
        ("training time", *(format_duration(each.seconds) for each in results)),
        ("training loss", *(_value(each.training_loss) for each in results)),
    ]
    if comparison.price is not None:
        rows.append(("cost", *(_cost(each.cost) for each in results)))
    for metric in comparison.metrics:
        rows.append((f"{metric}, last", *(_value(each.last.get(metric)) for each in results)))
        rows.append((f"{metric}, best", *(_value(each.best.get(metric)) for each in results)))
    if any(each.missing for each in results):
        rows.append(("missing files", *(", ".join(each.missing) for each in results)))
    return rows


def _reached_cells(each: Reached) -> tuple[str, ...]:
    if each.step is None:
        return ("never", "", "", "", "", "")
    return (
        f"{each.step:,}",
        format_count(each.tokens or 0),
        format_duration(each.seconds or 0),
        _cost(each.cost),
        "" if each.speedup is None else f"{each.speedup:.2f}x",
        "" if each.efficiency is None else f"{each.efficiency:.0%}",
    )


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
