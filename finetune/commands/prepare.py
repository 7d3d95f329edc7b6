"""`finetune prepare`, and the audit of the training data as a table with a row per source."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskID
from rich.table import Table

from finetune.commands.printing import print_facts, print_table, width
from finetune.config.load import LoadedConfig, load_config
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import AuditSection
from finetune.data.audit import Audit, Histogram, SourceAudit, Streamed
from finetune.data.token_cache.counts import REMEDY
from finetune.errors import DataError
from finetune.report.reporter import RunLog, print_line
from finetune.run.setup.training_data import audit_training_data, make_run_plan, make_training_data
from finetune.runtime.text import rich_console
from finetune.runtime.text.terminal import quiet_libraries

HEAD = (
    "source",
    "rows",
    "samples",
    "tokens",
    "targets",
    "masked",
    "cut",
    "too long",
    "no target",
    "duplicates",
    "longest",
)
HIDDEN_WHEN_ZERO = ("cut", "too long", "no target", "duplicates")
"""Columns that are omitted if every source has 0."""

TOKEN_COLUMNS = ("tokens", "targets", "masked", "longest")
"""Columns that are omitted for samples without tokens."""

_GAP, _MAX_NAMED = 2, 10
_STEPS = "▁▂▃▄▅▆▇█"


def prepare(path: Path, overrides: Sequence[str]) -> None:
    """Tokenize the job's training and evaluation data into the token cache, and print the audit.

    An interrupted command resumes at the next start. Raises ConfigError and DataError as training does; for shares
    above the limits of `data.audit`, after the audit has been printed.
    """
    tokenize_data(load_config(path, overrides))


def tokenize_data(loaded: LoadedConfig) -> Audit:
    """Prepare the rows of a loaded job, and return the audit."""
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
    except KeyboardInterrupt:
        print("Progress is saved. Run the same command to resume.", file=sys.stderr)
        raise
    audit = audit_training_data(config, training_data)
    print()
    print_audit(audit)
    if audit.exceeded:
        raise DataError(f"training with this job would stop here: {'; '.join(map(str, audit.exceeded))} {REMEDY}")
    make_run_plan(loaded, training_data)  # raises ConfigError for steps that are more than the data's
    streams = [key for key, source in training_data.sources.items() if isinstance(source, Streamed)]
    for key in streams:
        print(f"{key} is a stream: it is tokenized during training")
    if len(streams) < len(training_data.sources) or training_data.validation_set is not None:
        print("training with this job will reuse the tokenized data")
    return audit


def without_audit_limits(config: RunConfig) -> RunConfig:
    """Return the config without the limits of `data.audit`, so that all data can be inspected."""
    data = config.data.model_copy(update={"audit": AuditSection()})
    return config.model_copy(update={"data": data})


def print_audit(audit: Audit) -> None:
    """Print the audit as a table, or as lines if the terminal is too narrow, followed by notes."""
    head, *rows = audit_rows(audit)
    if sum(max(map(len, column)) + _GAP for column in zip(head, *rows, strict=True)) <= width() + _GAP:
        print_table(_table(head, rows))
    else:
        facts = ((row[0], ", ".join(map(" ".join, zip(head[1:], row[1:], strict=True)))) for row in rows)
        print_facts(facts, indent=max(len(row[0]) for row in rows) + _GAP)
    for line in (*audit_lines(audit), *(audit.template.lines() if audit.template else ())):
        print(line)


def audit_rows(audit: Audit) -> list[tuple[str, ...]]:
    """Return a header and a row of text for each source, for the total of several, and for the validation rows.

    Columns without any count are omitted.
    """
    rows = [HEAD, *(_row(source) for source in _shown(audit))]
    absent = () if audit.total.counts.has_tokens else TOKEN_COLUMNS
    columns = [
        column
        for column, name in enumerate(HEAD)
        if name not in absent and (name not in HIDDEN_WHEN_ZERO or any(row[column] != "0" for row in rows[1:]))
    ]
    return [tuple(row[column] for column in columns) for row in rows]


def audit_lines(audit: Audit, *, draws: bool = True) -> Iterator[str]:
    """Yield the notes below the table, with text histograms if `draws`; nothing for counts of 0."""
    total, classes, padding = audit.total, audit.classes, audit.padding
    for source in _shown(audit):
        if source.key != "total":
            yield from _source_lines(source)
    if classes:
        most, fewest = max(classes, key=lambda name: classes[name]), min(classes, key=lambda name: classes[name])
        span = f"from {classes[fewest]:,} (`{fewest}`) to {classes[most]:,} (`{most}`)"
        yield f"classes: {len(classes):,}, {span} samples"
        absent = [f"`{name}`" for name, count in classes.items() if count == 0]
        if absent:
            more = ", ..." if len(absent) > _MAX_NAMED else ""
            yield f"classes without a sample: {', '.join(absent[:_MAX_NAMED])}{more}"
    if audit.num_sequences:
        per_sample = audit.num_sequences / max(1, total.counts.samples)
        yield f"texts that the model reads: {audit.num_sequences:,}, {per_sample:.1f} per sample"
    if draws and total.counts.has_tokens:
        if total.lengths is not None and total.length_quantiles:
            yield "lengths: " + ", ".join(f"{name} {value:,}" for name, value in total.length_quantiles.items())
            yield f"         0 |{sparkline(total.lengths)}| {total.lengths.edges[-1]:,.0f} tokens"
        if total.target_shares is not None:
            yield f"targets: 0 |{sparkline(total.target_shares)}| 100% of a sample's tokens"
    if padding is not None:
        sampled = f"first {padding.num_batches:,} microbatches, {padding.num_samples:,} samples"
        plain = f"plain batches: {padding.plain_share:.1%}"
        saved = f", {padding.saved:.1%} of the work saved" if padding.saved > 0 else ""
        yield f"padding: {padding.share:.1%} of the computed positions ({plain}{saved}; {sampled})"
        if padding.filled is not None:
            yield f"filled: {padding.filled:.1%} of {padding.budget:,} tokens per position, on average"
    yield from (f"LIMIT {limit}" for limit in audit.exceeded)


def headline_numbers(audit: Audit) -> Iterator[tuple[str, str, str]]:
    """Yield the headline numbers: name, value and note."""
    counts, padding = audit.total.counts, audit.padding
    share = counts.targets / counts.tokens if counts.tokens else 0.0
    yield "samples", f"{counts.samples:,}", f"from {counts.rows:,} rows"
    if counts.has_tokens:
        yield "tokens", f"{counts.tokens:,}", f"{counts.tokens / max(1, counts.samples):,.0f} per sample"
        yield "targets", f"{share:.1%}", f"{counts.targets:,} tokens count in the loss"
        yield "longest row", f"{counts.longest:,}", "tokens, before truncation"
    if padding is not None:
        yield "padding", f"{padding.share:.1%}", f"of the computed positions; plain batches {padding.plain_share:.1%}"
        if padding.filled is not None:
            yield "filled", f"{padding.filled:.1%}", f"of {padding.budget:,} tokens, on average"
    if audit.total.duplicates is not None:
        yield "duplicates", f"{audit.total.duplicates:,}", "samples equal to an earlier one"


def sparkline(histogram: Histogram) -> str:
    """Return the bars as one line of text; a bar that is not empty is always visible.

    >>> sparkline(Histogram((0.0, 1.0, 2.0, 3.0), (0, 1, 8)))
    ' ▁█'
    """
    highest = max(histogram.bars, default=0) or 1
    return "".join(" " if bar == 0 else _STEPS[-(-bar * len(_STEPS) // highest) - 1] for bar in histogram.bars)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _shown(audit: Audit) -> Iterator[SourceAudit]:
    yield from audit.sources
    if len(audit.sources) > 1:
        yield audit.total
    if audit.validation is not None:
        yield audit.validation


def _row(audit: SourceAudit) -> tuple[str, ...]:
    counts = audit.counts
    return (
        f"{audit.key} (so far)" if audit.is_streamed else audit.key,
        f"{counts.rows:,}",
        f"{counts.samples:,}",
        f"{counts.tokens:,}",
        _with_share(counts.targets, counts.tokens),
        _with_share(audit.masked_tokens, counts.tokens),
        _with_share(counts.truncated_rows + counts.split_rows, counts.rows),
        _with_share(counts.long_rows, counts.rows),
        _with_share(counts.rows_without_target, counts.rows),
        "-" if audit.duplicates is None else _with_share(audit.duplicates, counts.samples),
        f"{counts.longest:,}",
    )


def _source_lines(audit: SourceAudit) -> Iterator[str]:
    counts = audit.counts
    if counts.has_tokens:
        yield f"{audit.key}: longest row {counts.longest:,} tokens: {counts.longest_place}"
    if counts.truncated_rows:
        lost = f"{counts.truncated_tokens:,} tokens cut off, {counts.truncated_targets:,} of them targets"
        yield f"{audit.key}: truncated {counts.truncated_rows:,} rows: {lost}"
    if counts.split_rows:
        dropped = f"; {counts.dropped_tokens:,} tokens were in windows without a target" * bool(counts.dropped_tokens)
        yield f"{audit.key}: split {counts.split_rows:,} rows into windows{dropped}"
    if counts.long_rows:
        lost = f"{counts.dropped_tokens:,} tokens, {counts.dropped_targets:,} of them targets"
        yield f"{audit.key}: dropped {counts.long_rows:,} rows as too long: {lost}"
    if counts.rows_without_target:
        empty = f", {counts.empty_rows:,} of them empty" if counts.empty_rows else ""
        yield (
            f"{audit.key}: {counts.rows_without_target:,} rows have no target{empty}; "
            f"the first: {counts.first_without_target}"
        )
    if counts.excluded_rows:
        yield f"{audit.key}: excluded {counts.excluded_rows:,} rows that are also in data.validation"
    if counts.unknown_tokens:
        yield f"{audit.key}: {counts.unknown_tokens:,} tokens represent text unknown to the tokenizer"
    if audit.in_validation:
        yield f"{audit.key}: {audit.in_validation:,} samples are also in the validation data"


def _with_share(number: int, whole: int) -> str:
    return f"{number:,} ({number / whole:.1%})" if number and whole else f"{number:,}"


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
