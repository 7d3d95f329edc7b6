"""Renders report.html from the current history of a run, once or again and again while the run goes on."""

import base64
import gzip
import importlib.util
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from finetune.errors import MissingPackage
from finetune.report.events import Event
from finetune.report.history import HistoryReader, RunHistory
from finetune.report.page.charts import charts_of, step_scales
from finetune.report.page.facts import (
    advice_line,
    config_lines,
    format_time,
    interval_advice,
    read_run_files,
    restart_line,
    run_state,
    tiles,
)
from finetune.runtime.files import atomic
from finetune.runtime.text.redact import redact_foreign
from finetune.runtime.text.terminal import escape_controls, format_json

TEMPLATES = Path(__file__).parent / "templates"


def render_page(template: str, *, folder: Path, data: Mapping[str, Any], **values: Any) -> str:
    """Return the page rendered from the template in the folder and the values, with `data` for charts.js.

    Raises MissingPackage where plotly is not installed.
    """
    return (
        _environment(folder)
        .get_template(template)
        .render(
            **values,
            nonce=secrets.token_urlsafe(16),
            data=script_json(data),
            style=_trusted("page.css"),
            charts=_trusted("charts.js"),
            plotly=_plotly(),
        )
    )


def script_json(value: Any) -> Markup:
    """Return JSON that is safe within `<script type="application/json">`."""
    text = json.dumps(_readable(value), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # ASCII: no U+2028 either, which ends a line in old readers


def _readable(value: Any) -> Any:
    """Return the value with its control characters and invisible ones as escapes, which charts show."""
    if isinstance(value, Mapping):
        return {_readable(name): _readable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(inner) for inner in value]
    return escape_controls(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _environment(folder: Path) -> Environment:
    """Return an environment for pages from the templates in the folder, which escapes foreign text."""
    environment = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_readable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["count"] = "{:,}".format
    return environment


@cache
def _trusted(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


@cache
def _plotly() -> Markup:
    spec = importlib.util.find_spec("plotly")
    path = Path(spec.origin).parent / "package_data" / "plotly.min.js" if spec and spec.origin else None
    if path is None or not path.is_file():
        raise MissingPackage(
            "report.html is drawn with plotly, which is not installed. Install it with: pip install plotly"
        )
    return Markup(base64.b64encode(gzip.compress(path.read_bytes(), mtime=0)).decode("ascii"))


REPORT_FILE = "report.html"

SMOOTHING = 0.6
"""Initial position of the smoothing slider."""


def report_page(folder: Path, history: RunHistory, *, now: float | None = None) -> str:
    """Return the page of the run in the folder."""
    now = time.time() if now is None else now
    files = read_run_files(folder)
    state, sentence = run_state(history, files.status, now=now)
    start = history.starts[-1] if history.starts else {}
    hours = ((start.get("config") or {}).get("run") or {}).get("hours_between_interruptions")
    hours = float(hours) if isinstance(hours, int | float) else None
    return render_page(
        "report.html.jinja",
        folder=TEMPLATES,
        data={
            "charts": charts_of(history),
            "runs": [{"name": folder.name, "scales": step_scales(history), "color": 0}],
            "skipped": [event["step"] for event in history.skipped],
            "resumed": [event["step"] for event in history.starts[1:]],
            "unit": history.unit,
        },
        title=folder.resolve().name,
        unit=history.unit,
        state=state,
        sentence=sentence,
        subtitle=[start.get("strategy", ""), f"page written {format_time(now)}"],
        arithmetic=start.get("arithmetic", ()),
        tiles=list(tiles(history)),
        smoothing=SMOOTHING,
        interruptions=[restart_line(history), advice_line(interval_advice(history, hours_stated=hours))],
        skipped=list(history.skipped),
        num_skipped=history.num_skipped,
        answers=list(history.answers.values()),
        messages=list(history.messages.values()),
        audit=files.audit.rows(),
        environment=redact_foreign(format_json(files.environment, indent=2)) if files.environment else "",
        config=config_lines(files.config),
        missing=(*files.missing, *history.damaged),
    )


def write_report(folder: Path, history: RunHistory) -> Path:
    """Write the page into the folder atomically, and return its path."""
    path = folder / REPORT_FILE
    page = report_page(folder, history)
    atomic.write_bytes(path, page.encode("utf-8", errors="backslashreplace"), survives_power_cut=False)
    return path


MIN_SECONDS = 10.0
"""Minimum time between two pages."""

MAX_SHARE = 0.005
"""Maximum share of time spent on pages: after a page that took 0.1 s, the next is written at least 20 s later."""


class PageReporter:
    """Rewrites the page from events.jsonl after new events, and a last time when it is closed.

    The thread reads the new lines of the file, so a resumed run continues the page, and training only wakes the thread.
    An exception in the thread is raised at the next event or at the end.
    """

    def __init__(
        self,
        events: Path,
        *,
        min_seconds: float = MIN_SECONDS,
        max_share: float = MAX_SHARE,
        on_read: Callable[[RunHistory], None] = lambda history: None,
    ) -> None:
        """`on_read` is called in the thread, with the history as of each page, before the page is written."""
        self._folder = events.parent
        self._reader = HistoryReader(events)
        self._min_seconds, self._max_share = min_seconds, max_share
        self._on_read = on_read
        self._has_events, self._is_ending = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._began = 0.0  # in CPU seconds of the thread
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        """Wake the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="report.html", daemon=True)
            self._thread.start()
        self._raise_error()
        if not self._has_events.is_set():
            self._has_events.set()

    def close(self) -> None:
        """Write the last page, unless there was no event."""
        self._is_ending.set()
        self._has_events.set()
        if self._thread is not None:
            self._thread.join()
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        try:
            while not self._is_ending.is_set():
                self._has_events.wait()
                self._is_ending.wait(self._write())
            self._write()
        except Exception as error:  # must not end the run
            self._error = error

    def _write(self) -> float:
        """Write the page, and return the number of seconds until the next."""
        self._has_events.clear()
        self._began = time.thread_time()
        self._reader.read_new(after_chunk=self._pause)
        self._on_read(self._reader.history)
        write_report(self._folder, self._reader.history)
        return max(self._min_seconds, self._seconds_due())

    def _pause(self) -> None:
        """Pause while the file of a long run is read; not at the end."""
        self._is_ending.wait(self._seconds_due())
        self._began = time.thread_time()

    def _seconds_due(self) -> float:
        return (time.thread_time() - self._began) / self._max_share
