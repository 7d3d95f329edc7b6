"""The commands that look at runs: report, compare."""

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.exit_codes import handle_errors
from finetune.runtime.optional import lazily

with lazily(freeze=True):
    from finetune.commands.compare import compare as compare_command
    from finetune.commands.report import report as report_command

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; the first is the reference.")]
Png = Annotated[
    Path | None, typer.Option("--png", metavar="FOLDER", help="Also write each chart as a PNG file (extra `plots`).")
]
Price = Annotated[
    float | None,
    typer.Option("--price", min=0.0, metavar="USD_PER_GPU_HOUR", help="Price of one device for an hour, in USD."),
]


def add_to(app: typer.Typer) -> None:
    """Add the commands to the app."""
    for command in (report, compare):
        app.command()(command)


@handle_errors
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, finished or not.")],
    png: Png = None,
    price: Price = None,
) -> None:
    """Write report.html of a run again: one page with its curves, answers, data and config.

    Training writes it, too, while it runs. See docs/how-to/reports.md.
    """
    report_command.report(run, png=png, price=price)


@handle_errors
def compare(
    runs: Runs,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with curves.")] = None,
    png: Png = None,
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
    metric: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Metric whose level is to be reached: `loss` or another of the evaluation."),
    ] = None,
    level: Annotated[
        float | None, typer.Option(metavar="VALUE", help="The level. Default: the best that all runs reach.")
    ] = None,
    price: Price = None,
) -> None:
    """Compare runs: results, time and money to a level, config and environment, and whether their losses are the same.

    Works on unfinished runs, too. See docs/how-to/reports.md.
    """
    compare_command.compare_runs(runs, html=html, png=png, json=json, metric=metric, level=level, price=price)
