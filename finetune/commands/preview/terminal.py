"""The preview in a terminal: in colours where there are any, with brackets and marks where there are none."""

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from finetune.commands.preview.batches import PreviewBatch, PreviewPosition, PreviewSample
from finetune.commands.preview.tokens import Piece, spans
from finetune.commands.printing import width
from finetune.runtime.text.rich_console import SafeConsole

CONTEXT_STYLES = ("grey89 on grey19", "grey89 on grey30")
TARGET_STYLES = ("black on #8fd9a0", "black on #67c27c")
"""Styles of tokens, in turn, so that it can be seen where one ends; both colours are set, to suit any terminal."""

BETWEEN, OPEN, CLOSE = "┊", "⟦", "⟧"


def print_batches(batches: Iterable[PreviewBatch], *, unit: str) -> None:
    """Print the microbatches, each sample token by token; `unit` stands at a position: a sample, pack or batch."""
    console = SafeConsole(width=width(), soft_wrap=True)
    has_colours = console.is_terminal and console.color_system is not None and not console.no_color
    console.print(_legend(has_colours))
    for batch in batches:
        console.print(Text(f"\n{format_batch(batch)}", style="bold"))
        for position in batch.positions:
            _print_position(console, position, unit=unit, has_colours=has_colours)
    sys.stdout.flush()


def format_batch(batch: PreviewBatch) -> str:
    """Return what a microbatch is in one line."""
    first, last = batch.first_position, batch.last_position
    where = f"position {first}" if first == last else f"positions {first} to {last}"
    shown = f" ({batch.num_shown} shown)" if batch.num_shown < batch.num_samples else ""
    return (
        f"━━ step {batch.step}, microbatch {batch.number} of {batch.of}: {where} ━━ {batch.num_samples} samples"
        f"{shown}, {batch.num_tokens:,} tokens, {batch.num_targets:,} targets, padding {batch.padding_share:.1%}"
    )


def format_position(position: PreviewPosition, *, unit: str) -> str:
    """Return what stands at a position that can hold several samples."""
    num_shown, number = len(position.samples), position.num_samples
    shown = f" ({num_shown} shown)" if num_shown < number else ""
    return f"┏━ {unit} at position {position.number}: {number} samples{shown}, {position.num_tokens:,} tokens"


def format_sample(sample: PreviewSample) -> str:
    """Return which sample it is and how many of its tokens are targets."""
    share = sample.num_targets / sample.num_tokens if sample.num_tokens else 0.0
    return (
        f"sample {sample.sample_id}  {sample.place}  {sample.num_tokens:,} tokens, "
        f"{sample.num_targets:,} targets ({share:.0%}){f' → {sample.answer}' if sample.answer else ''}"
    )


def plain_text(sample: PreviewSample) -> str:
    """Return the tokens without colours: targets in brackets, a mark between one token and the next."""
    found = []
    for stretch in spans(sample.pieces):
        text = BETWEEN.join(piece.shown for piece in stretch.pieces).replace(f"\n{BETWEEN}", "\n")
        found.append(f"{OPEN}{text}{CLOSE}" if stretch.is_target else text)
    return "".join(found)


def coloured_text(sample: PreviewSample) -> Text:
    """Return the tokens in colours."""
    text = Text()
    for number, piece in enumerate(sample.pieces):
        text.append(piece.shown, style=_style(piece, number))
    return text


def _print_position(console: Console, position: PreviewPosition, *, unit: str, has_colours: bool) -> None:
    is_group = unit != "sample"
    if is_group:
        console.print(Text(f"\n{format_position(position, unit=unit)}", style="bold cyan"))
    for sample in position.samples:
        head = format_sample(sample)
        console.print(Text(f"┣━ {head}" if is_group else f"\nposition {position.number}  {head}", style="cyan"))
        text = coloured_text(sample) if has_colours else Text(plain_text(sample))
        text.rstrip()
        console.print(text)
    if is_group:
        console.print(Text("┗━", style="cyan"))


def _style(piece: Piece, number: int) -> str:
    style = (TARGET_STYLES if piece.is_target else CONTEXT_STYLES)[number % 2]
    return f"bold {style}" if piece.is_special else style


def _legend(has_colours: bool) -> Text:
    if not has_colours:
        return Text(f"{OPEN}target{CLOSE}, the rest is context; {BETWEEN} between tokens, · a blank, ↵ a line end")
    legend = Text().append(" read ", style=CONTEXT_STYLES[0])
    legend.append(" target ", style=TARGET_STYLES[0])
    legend.append(" shades change from token to token; · is a blank, ↵ a line end, bold a special token", style="dim")
    return legend
