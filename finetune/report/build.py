"""Builds one reporter from the `report:` section."""

from collections.abc import Callable, Sequence
from pathlib import Path

from finetune.config.sections.report import ReportSection
from finetune.errors import UserError
from finetune.registry.observers import REPORTERS
from finetune.report.console import ConsoleReporter, choose_screen
from finetune.report.events import JsonlReporter, Warned
from finetune.report.history import EVENTS_FILE, RunHistory
from finetune.report.page.page import PageReporter
from finetune.report.prometheus import PrometheusReporter, require_client
from finetune.report.reporter import FanOut, Reporter
from finetune.report.trackers import TrackerReporter, check_trackers
from finetune.runtime import distributed


def build_reporter(
    section: ReportSection,
    *,
    run_folder: Path,
    is_main: bool,
    notes: Sequence[str] = (),
    on_read: Callable[[RunHistory], None] = lambda history: None,
    others: Sequence[Reporter] = (),
) -> FanOut:
    """Return the run's reporter on the main rank, nothing on others: events.jsonl, console, page, trackers, `/metrics`.

    `notes` were printed already; they go to events.jsonl. `on_read` is for the page's reporter, `others` are those of
    a caller. Nothing is written before the first event.
    Raises UserError or MissingPackage, on every rank alike, for a tracker that is unknown or not installed.
    """
    check_trackers(section.trackers)
    if section.prometheus is not None:
        require_client()
    if not is_main:
        return FanOut(())
    reporters: list[Reporter] = []
    for name in section.reporters:
        try:
            reporters.append(REPORTERS.resolve(name)(run_folder))
        except Exception as error:
            raise UserError(
                f"report.reporters: `{name}` failed to start: {type(error).__name__}: {error}. Correct it or remove it."
            ) from error
    reporters += [
        JsonlReporter(run_folder / EVENTS_FILE, notes=notes),
        ConsoleReporter(choose_screen(section.console), log_every_steps=section.log_every_steps),
        PageReporter(run_folder / EVENTS_FILE, on_read=on_read),
    ]
    reporters += [
        TrackerReporter(name, section, run_folder=run_folder, warn=lambda step, text: fan_out(Warned(step, text)))
        for name in dict.fromkeys(section.trackers)
    ]
    if section.prometheus is not None:
        address, name = section.prometheus_address, run_folder.name
        reporters.append(PrometheusReporter(section.prometheus, address=address, name=name, world=distributed.world()))
    fan_out = FanOut([*reporters, *others])
    return fan_out
