"""`finetune prepare`: tokenize all data before training, on the CPU, without a model or a process group."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskID

from finetune.commands.audit_tables import print_audit
from finetune.commands.preview.preview import without_audit_limits
from finetune.config.load import LoadedConfig, load_config
from finetune.data.audit import Audit, Streamed
from finetune.data.token_cache.counts import REMEDY
from finetune.errors import DataError
from finetune.report.reporter import RunLog, print_line
from finetune.run.setup.data import audit_training_data, make_training_data, verify_sets
from finetune.runtime.text import rich_console
from finetune.runtime.text.terminal import quiet_libraries

SECONDS_BETWEEN_LINES = 10.0

Clock = Callable[[], float]
Log = Callable[[str], None]
OnProgress = Callable[[str, int, int | None], None]


@contextmanager
def show_progress() -> Iterator[tuple[Log, OnProgress]]:
    """Yield a log function and a progress callback `(key, rows done, rows in total)`."""
    if not sys.stdout.isatty():
        yield print_line, ProgressLines(log=print_line)
        return
    console, text = rich_console.SafeConsole(), rich_console.SafeTextColumn
    columns = (text("{task.description}"), BarColumn(), text("{task.fields[progress]}"))
    with rich_console.SafeProgress(*columns, console=console, transient=True) as progress:
        yield lambda line: console.print(line, markup=False, soft_wrap=True), ProgressBars(progress)


class ProgressLines:
    """Logs a line of progress for each source every few seconds."""

    def __init__(self, *, log: Log, clock: Clock = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._paces: dict[str, Pace] = {}
        self._logged_at: dict[str, float] = {}

    def __call__(self, key: str, rows: int, num_rows: int | None) -> None:
        """Log the progress of the source if enough time has passed since its last line."""
        now = self._clock()
        pace = self._paces.setdefault(key, Pace(rows, now))
        if now - self._logged_at.setdefault(key, now) >= SECONDS_BETWEEN_LINES:
            self._logged_at[key] = now
            self._log(f"{key}: {pace.format_progress(rows, num_rows, now=now)}")


class ProgressBars:
    """Shows a progress bar for each source."""

    def __init__(self, progress: Progress, *, clock: Clock = time.monotonic) -> None:
        self._progress = progress
        self._clock = clock
        self._bars: dict[str, tuple[TaskID, Pace]] = {}

    def __call__(self, key: str, rows: int, num_rows: int | None) -> None:
        """Update the bar of the source."""
        now = self._clock()
        if key not in self._bars:
            self._bars[key] = self._progress.add_task(key, total=num_rows, progress=""), Pace(rows, now)
        bar, pace = self._bars[key]
        self._progress.update(bar, completed=rows, progress=pace.format_progress(rows, num_rows, now=now))


class Pace:
    """Rows per second since the display started; rows that were already done do not count."""

    def __init__(self, rows: int, now: float) -> None:
        self._first_rows = rows
        self._first_seconds = now

    def format_progress(self, rows: int, num_rows: int | None, *, now: float) -> str:
        """Return the progress as text, with the remaining time if the number of rows is known.

        >>> Pace(0, 10.0).format_progress(2_000, 10_000, now=14.0)
        '2,000 of 10,000 rows (20%), 500 rows/s, 16 s left'
        """
        seconds = now - self._first_seconds
        per_second = (rows - self._first_rows) / seconds if seconds > 0 else 0.0
        if not num_rows:
            return f"{rows:,} rows, {per_second:,.0f} rows/s"
        left = f", {(num_rows - rows) / per_second:,.0f} s left" if per_second else ""
        return f"{rows:,} of {num_rows:,} rows ({rows / num_rows:.0%}), {per_second:,.0f} rows/s{left}"


def prepare(path: Path, overrides: Sequence[str]) -> None:
    """Tokenize the job's training and evaluation data into the token cache, and print the audit.

    An interrupted command resumes at the next start. Raises ConfigError and DataError as training does; for shares
    above the limits of `data.audit`, after the audit has been printed.
    """
    prepare_data(load_config(path, overrides))


def prepare_data(loaded: LoadedConfig) -> Audit:
    """Do the same for a loaded job, and return the audit."""
    quiet_libraries(is_main=True)
    config = loaded.config
    try:
        with show_progress() as (log, on_progress):
            training_data = make_training_data(
                without_audit_limits(config),
                RunLog(is_main=True, write=log),
                on_progress=on_progress,
                locations=loaded.sources,
            )
            verify_sets(training_data)
    except KeyboardInterrupt:
        print("Progress is saved. Run the same command to resume.", file=sys.stderr)
        raise
    audit = audit_training_data(config, training_data)
    print()
    print_audit(audit)
    if audit.exceeded:
        raise DataError(f"training with this job would stop here: {'; '.join(map(str, audit.exceeded))} {REMEDY}")
    streams = [key for key, source in training_data.sources.items() if isinstance(source, Streamed)]
    for key in streams:
        print(f"{key} is a stream: it is tokenized during training")
    if len(streams) < len(training_data.sources) or training_data.validation_set is not None:
        print("training with this job will reuse the tokenized data")
    return audit
