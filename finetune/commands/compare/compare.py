"""`finetune compare`: to the terminal, as JSON, as a page and as PNG files."""

from collections.abc import Sequence
from pathlib import Path

from finetune.commands.compare.comparison import build_comparison
from finetune.commands.compare.page import write_page
from finetune.commands.compare.tables import print_comparison
from finetune.commands.printing import print_json
from finetune.report.page.png import write_pngs


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
