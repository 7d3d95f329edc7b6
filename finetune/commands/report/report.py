"""Rebuilds report.html of a run from its folder."""

from pathlib import Path

from finetune.errors import UserError
from finetune.report.history import EVENTS_FILE, HistoryReader
from finetune.report.page.charts import charts_of, write_pngs
from finetune.report.page.page import write_report


def report(run: Path, *, png: Path | None = None, price: float | None = None) -> None:
    """Write the page of the run, and its charts as PNG files if a folder is given."""
    require_events(run)
    reader = HistoryReader(run / EVENTS_FILE)
    reader.read_new()
    print(f"wrote {write_report(run, reader.history, price=price)}")
    if png is not None:
        paths = write_pngs(charts_of(reader.history), png)
        print(f"wrote {len(paths)} PNG files to {png}")


def require_events(run: Path) -> None:
    """Raise UserError unless the folder is that of a run with events."""
    if not (run / EVENTS_FILE).is_file():
        problem = "has no events.jsonl: it is not the folder of a run" if run.is_dir() else "is not a folder"
        raise UserError(f"{run} {problem}. Write the run.folder of the job, or wait until its training begins.")
