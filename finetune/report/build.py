"""The `report:` section becomes one reporter."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.config.sections.report import ReportSection
from finetune.report.console import ConsoleReporter, choose_screen
from finetune.report.jsonl import JsonlReporter
from finetune.report.page.reporter import PageReporter
from finetune.report.reporter import FanOut, NullReporter, Reporter
from finetune.report.trackers import TrackersReporter, check_trackers

EVENTS_FILE = "events.jsonl"


def build_reporter(
    section: ReportSection,
    *,
    run_folder: Path,
    accelerator: Any,
    is_main: bool,
    notes: Sequence[str] = (),
) -> Reporter:
    """Return the run's reporter: events.jsonl, console, report.html and trackers on the main rank, none on others.

    `notes` were printed already; they go to events.jsonl. Nothing is written before the first event.
    Raises UserError or MissingPackage, on every rank alike, for a tracker that is unknown or not installed.
    """
    check_trackers(section.trackers)
    if not is_main:
        return NullReporter()
    reporters: list[Reporter] = [
        JsonlReporter(run_folder / EVENTS_FILE, notes=notes),
        ConsoleReporter(choose_screen(section.console), log_every_steps=section.log_every_steps),
    ]
    reporters.append(PageReporter(run_folder / EVENTS_FILE))
    if section.trackers:
        tracked = TrackersReporter(
            accelerator,
            section.trackers,
            project=section.project or run_folder.parent.name or "finetune",
            run_folder=run_folder,
            log_every_steps=section.log_every_steps,
        )
        reporters.append(tracked)
    return FanOut(reporters)
