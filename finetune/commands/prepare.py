"""`finetune prepare`, and the audit of the training data as a table with a row per source."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

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
        training_data = make_training_data(
            without_audit_limits(config),
            RunLog(is_main=True),
            on_progress=ProgressLines(),
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
    for line in (*_audit_lines(audit), *(audit.template.lines() if audit.template else ())):
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


def _audit_lines(audit: Audit) -> Iterator[str]:
    """Yield the notes below the table, with text histograms; nothing for counts of 0."""
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
    if total.counts.has_tokens:
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


_NOTES: Mapping[str, str] = {
    "truncated_rows": "truncated {0.truncated_rows:,} rows: {0.truncated_tokens:,} tokens cut off, "
    "{0.truncated_targets:,} of them targets",
    "split_rows": "split {0.split_rows:,} rows into windows; {0.dropped_tokens:,} tokens were in windows without "
    "a target",
    "long_rows": "dropped {0.long_rows:,} rows as too long: {0.dropped_tokens:,} tokens, {0.dropped_targets:,} of them "
    "targets",
    "rows_without_target": "{0.rows_without_target:,} rows have no target, {0.empty_rows:,} of them empty; the first: "
    "{0.first_without_target}",
    "excluded_rows": "excluded {0.excluded_rows:,} rows that are also in data.validation",
    "unknown_tokens": "{0.unknown_tokens:,} tokens represent text unknown to the tokenizer",
}
"""Sentences on a source by the count that they need."""


def _source_lines(audit: SourceAudit) -> Iterator[str]:
    counts = audit.counts
    if counts.has_tokens:
        yield f"{audit.key}: longest row {counts.longest:,} tokens: {counts.longest_place}"
    yield from (f"{audit.key}: {note.format(counts)}" for name, note in _NOTES.items() if getattr(counts, name))
    if audit.in_validation:
        yield f"{audit.key}: {audit.in_validation:,} samples are also in the validation data"


def _with_share(number: int, whole: int) -> str:
    return f"{number:,} ({number / whole:.1%})" if number and whole else f"{number:,}"


SECONDS_BETWEEN_LINES = 10.0


class ProgressLines:
    """Logs a line of progress for each source every few seconds; rows that were already done do not count as fast."""

    def __init__(self, *, log: Callable[[str], None] = print_line, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._starts: dict[str, tuple[int, float]] = {}  # rows that were there, and when
        self._logged_at: dict[str, float] = {}

    def __call__(self, key: str, rows: int, num_rows: int | None) -> None:
        """Log the progress of the source if enough time has passed since its last line."""
        now = self._clock()
        first_rows, start = self._starts.setdefault(key, (rows, now))
        if now - self._logged_at.setdefault(key, now) < SECONDS_BETWEEN_LINES:
            return
        self._logged_at[key] = now
        per_second = (rows - first_rows) / (now - start)
        if not num_rows:
            self._log(f"{key}: {rows:,} rows, {per_second:,.0f} rows/s")
            return
        left = f", {(num_rows - rows) / per_second:,.0f} s left" if per_second else ""
        self._log(f"{key}: {rows:,} of {num_rows:,} rows ({rows / num_rows:.0%}), {per_second:,.0f} rows/s{left}")
