"""`finetune preview`: the samples as the model sees them, without a model or a process group.

For images: files, sizes, classes, and the size that the model sees.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from finetune.commands.prepare import audit_lines, audit_rows, headline_numbers, print_audit, without_audit_limits
from finetune.commands.preview.batches import BatchPreview, PreviewBatch, PreviewSample, spans
from finetune.commands.printing import width
from finetune.config.load import load_config
from finetune.config.run_config import RunConfig
from finetune.data.audit import Audit, Histogram
from finetune.data.encoding.labelled import IMAGE, LABEL, image_name
from finetune.data.images import image_facts
from finetune.errors import UserError
from finetune.registry.tasks import TASKS
from finetune.report.page.facts import Tile
from finetune.report.page.page import html_environment
from finetune.report.reporter import RunLog
from finetune.run.setup.training_data import audit_training_data, make_training_data
from finetune.runtime.files import atomic
from finetune.runtime.resources import format_size
from finetune.runtime.text.rich_console import SafeConsole
from finetune.runtime.text.terminal import printable, quiet_libraries

POSITION_UNITS = {"samples": "sample", "packs": "pack", "tokens": "batch"}
"""The unit at a position of the order, by `data.batching.by`."""


def preview(path: Path, overrides: Sequence[str], *, num_rows: int, html: Path | None, start: int) -> None:
    """Print the job's training samples from a position on, and the audit; with `html`, write them as a page too.

    Tokenizes first, as training would, but ignores the limits of `data.audit` so that the data can be inspected.
    Raises ConfigError and DataError as training does.
    """
    quiet_libraries(is_main=True)
    loaded = load_config(path, overrides)
    config = loaded.config
    if html is not None and html.is_dir():
        raise UserError(f"--html: {html} is a folder. Pass a file: {html / 'preview.html'}.")
    if not TASKS[config.task.name].has_tokens:
        if html is not None:
            raise UserError("--html: not available for images. Omit it: the preview lists the image files.")
        _preview_images(config, start=start, num_samples=num_rows)
        return
    log = RunLog(is_main=True)
    training_data = make_training_data(without_audit_limits(config), log, locations=loaded.sources)
    unit = POSITION_UNITS[config.data.batching.by]
    batch_preview = BatchPreview(
        training_data.training,
        training_data.task,
        training_data.tokenizer,
        global_batch_size=config.train.global_batch_size,
        microbatch_size=config.train.known_microbatch_size,
    )
    batches = list(batch_preview.batches(start=start, num_samples=num_rows))
    audit = audit_training_data(config, training_data)
    print_batches(batches, unit=unit)
    print()
    print_audit(audit)
    if html is None:
        return
    data, train = config.data, config.train
    facts = [
        f"task {config.task.name}",
        *([f"max_length {data.max_length:,}, longer rows: {data.over_length}"] if data.max_length else []),
        f"batching by {data.batching.by}",
        f"{train.global_batch_size:,} per step, {train.known_microbatch_size:,} per microbatch",
        f"seed {config.run.seed}" if data.shuffle else "not shuffled",
    ]
    page = preview_page(batches, audit, title=f"Preview of {path.name}", facts=facts, unit=unit)
    try:
        atomic.write_text(html, printable(page))
    except OSError as error:
        raise UserError(f"--html: {html} cannot be written: {error.strerror}. Choose another file.") from error
    print(f"wrote {html}")


def _preview_images(config: RunConfig, *, start: int, num_samples: int) -> None:
    """Print a heading per microbatch, a line per image, the form of the tensors, and the audit."""
    data = make_training_data(without_audit_limits(config), RunLog(is_main=True))
    audit = audit_training_data(config, data)
    view, task = data.training, data.task
    batch_size, microbatch_size = config.train.global_batch_size, config.train.known_microbatch_size
    ids = view.order.samples(start, start + num_samples).tolist()
    for position, sample_id in enumerate(ids, start=start):
        if position == start or position % microbatch_size == 0:
            step, offset = divmod(position, batch_size)
            number, num_microbatches = offset // microbatch_size + 1, batch_size // microbatch_size
            print(f"\n━━ step {step + 1}, microbatch {number} of {num_microbatches}")
        features = view.samples[sample_id]
        content = features.arrays[IMAGE].tobytes()
        image = image_facts(content)
        label = task.data_facts.values["labels"][int(features.arrays[LABEL][0])]
        size = f"{image.width} x {image.height} {image.format}, {format_size(len(content))}"
        location = view.samples.location(sample_id)
        print(f"position {position}  {image_name(features)}  {size}  class `{label}`  ({location})")
    pixels = task.collate([view.samples[ids[0]]]).inputs["pixel_values"]
    channels, height, width = pixels.shape[1:]
    print(
        f"\nthe model sees {channels} x {height} x {width} (channels, height, width), first image with values from "
        f"{pixels.min().item():.2f} to {pixels.max().item():.2f}\n"
    )
    print_audit(audit)


CONTEXT_STYLES = ("grey89 on grey19", "grey89 on grey30")
TARGET_STYLES = ("black on #8fd9a0", "black on #67c27c")
"""Alternating styles that show where a token ends; foreground and background are set, to suit any terminal."""

BETWEEN, OPEN, CLOSE = "┊", "⟦", "⟧"


def print_batches(batches: Iterable[PreviewBatch], *, unit: str) -> None:
    """Print the microbatches, each sample token by token; `unit` is what a position holds: a sample, pack or batch."""
    console = SafeConsole(width=width(), soft_wrap=True)
    has_colors = console.is_terminal and console.color_system is not None and not console.no_color
    if has_colors:
        legend = Text().append(" context ", style=CONTEXT_STYLES[0]).append(" target ", style=TARGET_STYLES[0])
        legend.append(" shades alternate between tokens; · is a space, ↵ a newline, bold a special token", style="dim")
        console.print(legend)
    else:
        console.print(
            Text(f"{OPEN}target{CLOSE}, everything else is context; {BETWEEN} between tokens, · a space, ↵ a newline")
        )
    for batch in batches:
        first, last = batch.first_position, batch.last_position
        positions = f"position {first}" if first == last else f"positions {first} to {last}"
        shown = f" ({batch.num_shown} shown)" if batch.num_shown < batch.num_samples else ""
        title = (
            f"━━ step {batch.step}, microbatch {batch.number} of {batch.of}: {positions} ━━ {batch.num_samples} samples"
            f"{shown}, {batch.num_tokens:,} tokens, {batch.num_targets:,} targets, padding {batch.padding_share:.1%}"
        )
        console.print(Text(f"\n{title}", style="bold"))
        for position in batch.positions:
            is_group = unit != "sample"
            if is_group:
                num_shown, number = len(position.samples), position.num_samples
                shown = f" ({num_shown} shown)" if num_shown < number else ""
                title = f"{unit} at position {position.number}: {number} samples{shown}, {position.num_tokens:,} tokens"
                console.print(Text(f"\n┏━ {title}", style="bold cyan"))
            for sample in position.samples:
                share = sample.num_targets / sample.num_tokens if sample.num_tokens else 0.0
                answer = f" → {sample.answer}" if sample.answer else ""
                counts = f"{sample.num_tokens:,} tokens, {sample.num_targets:,} targets ({share:.0%}){answer}"
                head = f"sample {sample.sample_id}  {sample.location}  {counts}"
                console.print(Text(f"┣━ {head}" if is_group else f"\nposition {position.number}  {head}", style="cyan"))
                text = Text("" if has_colors else plain_text(sample))
                for shade, piece in enumerate(sample.pieces if has_colors else ()):
                    style = (TARGET_STYLES if piece.is_target else CONTEXT_STYLES)[shade % 2]
                    text.append(piece.shown, style=f"bold {style}" if piece.is_special else style)
                text.rstrip()
                console.print(text)
            if is_group:
                console.print(Text("┗━", style="cyan"))
    sys.stdout.flush()


def plain_text(sample: PreviewSample) -> str:
    """Return the tokens without colors: targets in brackets, a mark between tokens."""
    texts = []
    for is_target, pieces in spans(sample.pieces):
        text = BETWEEN.join(piece.shown for piece in pieces).replace(f"\n{BETWEEN}", "\n")
        texts.append(f"{OPEN}{text}{CLOSE}" if is_target else text)
    return "".join(texts)


TEMPLATES = Path(__file__).parent / "templates"


def preview_page(batches: Sequence[PreviewBatch], audit: Audit, *, title: str, facts: Sequence[str], unit: str) -> str:
    """Return the page; `unit` is what a position holds: a sample, pack or batch."""
    environment = html_environment(TEMPLATES)
    environment.filters |= {"count": "{:,}".format, "share": "{:.1%}".format, "stretches": spans, "lanes": forward_rows}
    head, *rows = audit_rows(audit)
    return environment.get_template("preview.html.jinja").render(
        title=title,
        facts=list(facts),
        unit=unit,
        tiles=[Tile(*numbers) for numbers in headline_numbers(audit)],
        charts=list(_charts(audit)),
        table={"head": head, "rows": rows},
        notes=[{"text": line, "is_bad": line.startswith("LIMIT")} for line in audit_lines(audit, draws=False)],
        template=list(audit.template.lines()) if audit.template else [],
        batches=list(batches),
    )


def forward_rows(batch: PreviewBatch) -> list[tuple[str, list[tuple[str, float]]]]:
    """Return the forward pass as labelled bars: samples with their padding, or the samples that are joined end to end.

    A bar's parts are `context` or `target` tokens (with `first` at the start of a sample), `padding`, or `hidden`
    samples, each with its percentage.
    """
    rows = []
    if batch.is_padded:
        width = batch.num_computed // batch.num_lanes
        for sample in (sample for position in batch.positions for sample in position.samples):
            padding = ("padding", _percent(width - sample.num_tokens, width))
            label = f"{sample.location}: {sample.num_tokens:,} tokens"
            rows.append((label, [*_segments(sample, of=width), padding]))
        return rows
    longest = max(position.num_tokens for position in batch.positions)
    for position in batch.positions:
        num_shown = sum(sample.num_tokens for sample in position.samples)
        parts = [part for sample in position.samples for part in _segments(sample, of=longest)]
        hidden = ("hidden", _percent(position.num_tokens - num_shown, longest))
        rows.append((f"position {position.number}: {position.num_tokens:,} tokens", [*parts, hidden]))
    return rows


def _segments(sample: PreviewSample, *, of: int) -> Iterator[tuple[str, float]]:
    for number, (is_target, pieces) in enumerate(spans(sample.pieces)):
        role = "target" if is_target else "context"
        yield role if number else f"{role} first", _percent(sum(len(piece.ids) for piece in pieces), of)


def _charts(audit: Audit) -> Iterator[dict[str, Any]]:
    """Yield the histograms for the template: a title, a note, the mark at the end of the axis, and the bars."""
    total = audit.total
    if total.lengths is not None and total.length_quantiles:
        median, high = total.length_quantiles["p50"], total.length_quantiles["p99"]
        note, mark = f"half have up to {median:,} tokens, 99% up to {high:,}", f"{total.lengths.edges[-1]:,.0f} tokens"
        bars = _bars(total.lengths, "{:,.0f} to {:,.0f} tokens", whole=True)
        yield {"title": "Length of samples", "note": note, "mark": mark, "bars": list(bars)}
    if total.target_shares is not None:
        bars = _bars(total.target_shares, "{:.0%} to {:.0%} targets")
        title, note = "Share of targets in a sample", "number of samples"
        yield {"title": title, "note": note, "mark": "100%", "bars": list(bars)}


def _bars(histogram: Histogram, label: str, *, whole: bool = False) -> Iterator[dict[str, Any]]:
    highest = max(histogram.bars, default=0) or 1
    for number, count in enumerate(histogram.bars):
        low, high = histogram.edges[number], histogram.edges[number + 1] - whole
        yield {"label": label.format(low, high), "count": count, "percent": _percent(count, highest)}


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 3)
