"""The preview as one self-contained HTML page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from finetune.commands.audit_tables import audit_lines, audit_rows, headline_numbers
from finetune.commands.preview.batches import PreviewBatch, PreviewPosition, PreviewSample
from finetune.commands.preview.tokens import spans
from finetune.data.audit.audit import Audit, Histogram

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Tile:
    """One number to see first."""

    name: str
    value: str
    note: str


@dataclass(frozen=True)
class Bar:
    """One bar of a chart."""

    label: str
    count: int
    percent: float  # of the chart's height


@dataclass(frozen=True)
class Chart:
    """A histogram with what it is of."""

    title: str
    note: str
    mark: str  # at the right end of the axis
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Segment:
    """A piece of a lane: tokens that are context or targets, `first` at the edge of a sample, padding, or hidden."""

    kind: str
    percent: float


@dataclass(frozen=True)
class ForwardRow:
    """A row of the forward pass, or what stands at one position of it."""

    label: str
    parts: tuple[Segment, ...]


def preview_page(batches: Sequence[PreviewBatch], audit: Audit, *, title: str, facts: Sequence[str], unit: str) -> str:
    """Return the page; `unit` is what stands at a position: sample, pack or batch."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=False
    )
    environment.filters |= {"count": "{:,}".format, "share": "{:.1%}".format, "stretches": spans, "lanes": forward_rows}
    head, *rows = audit_rows(audit)
    return environment.get_template("preview.html.jinja").render(
        title=title,
        facts=list(facts),
        unit=unit,
        tiles=[Tile(*each) for each in headline_numbers(audit)],
        charts=list(_charts(audit)),
        table={"head": head, "rows": rows},
        notes=[{"text": line, "is_bad": line.startswith("LIMIT")} for line in audit_lines(audit, draws=False)],
        template=list(audit.template.lines()) if audit.template else [],
        batches=list(batches),
    )


def forward_rows(batch: PreviewBatch) -> list[ForwardRow]:
    """Return what is shown of the forward pass as bars: samples with their padding, or what lies end to end."""
    if batch.is_padded:
        width = batch.num_computed // batch.num_lanes
        return [_padded(sample, width) for position in batch.positions for sample in position.samples]
    longest = max(position.num_tokens for position in batch.positions)
    return [_joined(position, longest) for position in batch.positions]


def _joined(position: PreviewPosition, longest: int) -> ForwardRow:
    shown = sum(sample.num_tokens for sample in position.samples)
    parts = [part for sample in position.samples for part in _segments(sample, of=longest)]
    hidden = Segment("hidden", _percent(position.num_tokens - shown, longest))
    return ForwardRow(f"position {position.number}: {position.num_tokens:,} tokens", (*parts, hidden))


def _padded(sample: PreviewSample, width: int) -> ForwardRow:
    padding = Segment("padding", _percent(width - sample.num_tokens, width))
    return ForwardRow(f"{sample.place}: {sample.num_tokens:,} tokens", (*_segments(sample, of=width), padding))


def _segments(sample: PreviewSample, *, of: int) -> Iterator[Segment]:
    for number, stretch in enumerate(spans(sample.pieces)):
        num_tokens = sum(len(piece.ids) for piece in stretch.pieces)
        kind = "target" if stretch.is_target else "context"
        yield Segment(kind if number else f"{kind} first", _percent(num_tokens, of))


def _charts(audit: Audit) -> Iterator[Chart]:
    total = audit.total
    if total.lengths is not None and total.length_quantiles:
        middle, high = total.length_quantiles["p50"], total.length_quantiles["p99"]
        bars = tuple(_bars(total.lengths, "{:,.0f} to {:,.0f} tokens", whole=True))
        mark = f"{total.lengths.edges[-1]:,.0f} tokens"
        yield Chart("Length of samples", f"half have up to {middle:,} tokens, 99% up to {high:,}", mark, bars)
    if total.target_shares is not None:
        bars = tuple(_bars(total.target_shares, "{:.0%} to {:.0%} targets"))
        yield Chart("Share of targets in a sample", "number of samples", "100%", bars)


def _bars(found: Histogram, label: str, *, whole: bool = False) -> Iterator[Bar]:
    highest = max(found.bars, default=0) or 1
    for number, count in enumerate(found.bars):
        low, high = found.edges[number], found.edges[number + 1] - whole
        yield Bar(label.format(low, high), count, _percent(count, highest))


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 3)
