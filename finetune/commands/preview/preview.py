"""`finetune preview`: the samples as the model sees them, without a model or a process group.

For images: files, sizes, classes, and the size that the model sees.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.text import Text

from finetune.commands.prepare import print_audit, without_audit_limits
from finetune.commands.printing import width
from finetune.config.load import load_config
from finetune.config.run_config import RunConfig
from finetune.data.encoding.labelled import IMAGE, LABEL, image_name
from finetune.data.features import Features
from finetune.data.images import image_facts
from finetune.data.templates.chat_template import is_special
from finetune.registry.tasks import TASKS
from finetune.report.reporter import RunLog
from finetune.run.setup.training_data import TrainingData, audit_training_data, make_training_data
from finetune.runtime.resources import format_size
from finetune.runtime.text.rich_console import SafeConsole
from finetune.runtime.text.terminal import quiet_libraries

POSITION_UNITS = {"samples": "sample", "packs": "pack", "tokens": "batch"}
"""The unit at a position of the order, by `data.batching.by`."""

REPLACEMENT_CHARACTER = "\ufffd"
"""The decoder's output for an incomplete character."""

MAX_CHARACTER_TOKENS = 8
"""The number of tokens after which an incomplete character is shown as is."""

MARKS = {" ": "·", "\t": "⇥", "\r": "␍", "\u00a0": "⍽", "\n": "↵\n"}
"""Marks for whitespace; a newline is marked and kept."""

NO_TEXT = "∅"
BETWEEN, OPEN, CLOSE = "┊", "⟦", "⟧"

CONTEXT_STYLES = ("grey89 on grey19", "grey89 on grey30")
TARGET_STYLES = ("black on #8fd9a0", "black on #67c27c")
"""Alternating styles that show where a token ends; foreground and background are set, to suit any terminal."""


def preview(path: Path, overrides: Sequence[str], *, num_rows: int, start: int) -> None:
    """Print the job's training samples from a position on, and the audit.

    Tokenizes first, as training would, but ignores the limits of `data.audit` so that the data can be inspected.
    Raises ConfigError and DataError as training does.
    """
    quiet_libraries(is_main=True)
    loaded = load_config(path, overrides)
    config = loaded.config
    data = make_training_data(without_audit_limits(config), RunLog(is_main=True), locations=loaded.sources)
    print_samples = _print_samples if TASKS[config.task.name].has_tokens else _print_images
    print_samples(config, data, start=start, num_samples=num_rows)
    print()
    print_audit(audit_training_data(config, data))


def _print_images(config: RunConfig, data: TrainingData, *, start: int, num_samples: int) -> None:
    """Print a heading per microbatch, a line per image, and the form of the tensors."""
    view, task = data.training, data.task
    microbatch_size = config.train.known_microbatch_size
    ids = view.order.samples(start, start + num_samples).tolist()
    for position, sample_id in enumerate(ids, start=start):
        if position == start or position % microbatch_size == 0:
            print(f"\n━━ {_microbatch(config, position)}")
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
        f"{pixels.min().item():.2f} to {pixels.max().item():.2f}"
    )


def _microbatch(config: RunConfig, position: int) -> str:
    """Return the step and the microbatch of a position of the order, each from 1."""
    size = config.train.known_microbatch_size
    step, offset = divmod(position, config.train.global_batch_size)
    return f"step {step + 1}, microbatch {offset // size + 1} of {config.train.global_batch_size // size}"


def _print_samples(config: RunConfig, data: TrainingData, *, start: int, num_samples: int) -> None:
    """Print microbatches from the one that holds position `start`, until `num_samples` samples are shown.

    The numbers of a microbatch cover all of it, even if only some of its samples are shown.
    """
    console = SafeConsole(width=width(), soft_wrap=True)
    has_colors = console.is_terminal and console.color_system is not None and not console.no_color
    if has_colors:
        legend = Text().append(" context ", style=CONTEXT_STYLES[0]).append(" target ", style=TARGET_STYLES[0])
        legend.append(" shades alternate between tokens; · is a space, ↵ a newline, bold a special token", style="dim")
    else:
        legend = Text(
            f"{OPEN}target{CLOSE}, everything else is context; {BETWEEN} between tokens, · a space, ↵ a newline"
        )
    console.print(legend)
    view, size = data.training, config.train.known_microbatch_size
    while num_samples > 0:
        first = start // size * size
        shown: dict[int, list[int]] = {}  # sample ids by position
        for position in range(start, first + size):
            shown[position] = view.order.samples(position, position + 1)[:num_samples].tolist()
            num_samples -= len(shown[position])
        (ids,) = view.order.cut(first, first + size, size)
        batch = data.task.collate([view.samples[sample_id] for sample_id in ids.tolist()])
        positions = f"position {first}" if size == 1 else f"positions {first} to {first + size - 1}"
        padding = 1 - batch.num_tokens / (math.prod(batch.positions) or 1)
        title = (
            f"━━ {_microbatch(config, first)}: {positions} ━━ "
            f"{_counted(sum(map(len, shown.values())), len(batch.sample_ids))}, {batch.num_tokens:,} tokens, "
            f"{batch.num_targets:,} targets, padding {padding:.1%}"
        )
        console.print(Text(f"\n{title}", style="bold"))
        for position, sample_ids in shown.items():
            if sample_ids:
                _print_position(console, config, data, position=position, sample_ids=sample_ids, has_colors=has_colors)
        start = first + size
    sys.stdout.flush()


def _print_position(
    console: SafeConsole,
    config: RunConfig,
    data: TrainingData,
    *,
    position: int,
    sample_ids: Sequence[int],
    has_colors: bool,
) -> None:
    """Print a sample, or the shown ones of a pack or batch with a frame around them."""
    view, unit = data.training, POSITION_UNITS[config.data.batching.by]
    is_group = unit != "sample"
    if is_group:
        ids = view.order.samples(position, position + 1)
        counts = f"{_counted(len(sample_ids), len(ids))}, {int(view.samples.lengths_of(ids).sum()):,} tokens"
        console.print(Text(f"\n┏━ {unit} at position {position}: {counts}", style="bold cyan"))
    for sample_id in sample_ids:
        features = view.samples[sample_id]
        answer = data.task.label_text(features)
        share = features.num_targets / features.length if features.length else 0.0
        counts = f"{features.length:,} tokens, {features.num_targets:,} targets ({share:.0%})"
        head = f"sample {sample_id}  {view.samples.location(sample_id)}  {counts}{f' → {answer}' if answer else ''}"
        console.print(Text(f"┣━ {head}" if is_group else f"\nposition {position}  {head}", style="cyan"))
        pieces = tuple(pieces_of(features, data.tokenizer))
        console.print(_colored(pieces) if has_colors else Text(plain_text(pieces).rstrip()))
    if is_group:
        console.print(Text("┗━", style="cyan"))


def _counted(num_shown: int, number: int) -> str:
    return f"{number} samples{f' ({num_shown} shown)' if num_shown < number else ''}"


@dataclass(frozen=True)
class Piece:
    """A token, or several tokens that together make up one character."""

    ids: tuple[int, ...]
    text: str
    is_target: bool
    is_special: bool

    @property
    def shown(self) -> str:
        """Return the text with visible whitespace; NO_TEXT if it is empty."""
        return visible(self.text) or NO_TEXT


def visible(text: str) -> str:
    """Return the text with visible whitespace, and with codes for other characters that are not printable.

    >>> visible("a b")
    'a·b'
    """
    texts = (MARKS.get(one, one if one.isprintable() else f"⟨{ord(one):02X}⟩") for one in text)
    return "".join(texts)


def pieces_of(features: Features, tokenizer: Any) -> Iterator[Piece]:
    """Yield the sample's tokens as text; a piece ends where a character does, or where targets start or end.

    Yields nothing for a sample without tokens. If the target is the whole sample, no token is a target.
    """
    ids = features.arrays["input_ids"].tolist() if "input_ids" in features.arrays else []
    is_target = features.arrays["is_target"].tolist() if "is_target" in features.arrays else [False] * len(ids)
    start = 0  # of the piece
    context_start = 0  # of the tokens that are decoded with it: a token's leading space depends on the one before
    for end in range(1, len(ids) + 1):
        before = _decoded(tokenizer, ids[context_start:start])
        text = _decoded(tokenizer, ids[context_start:end])[len(before) :]
        may_continue = end < len(ids) and is_target[end] == is_target[start] and end - start < MAX_CHARACTER_TOKENS
        if text.endswith(REPLACEMENT_CHARACTER) and may_continue:
            continue
        special = end == start + 1 and is_special(tokenizer, ids[start])
        yield Piece(tuple(ids[start:end]), text, is_target[start], special)
        context_start, start = start, end


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    if not ids:
        return ""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _colored(pieces: Sequence[Piece]) -> Text:
    text = Text()
    for number, piece in enumerate(pieces):
        style = (TARGET_STYLES if piece.is_target else CONTEXT_STYLES)[number % 2]
        text.append(piece.shown, style=f"bold {style}" if piece.is_special else style)
    text.rstrip()
    return text


def plain_text(pieces: Sequence[Piece]) -> str:
    """Return the tokens without colors: targets in brackets, a mark between tokens."""
    texts = []
    for is_target, span in groupby(pieces, key=lambda piece: piece.is_target):
        text = BETWEEN.join(piece.shown for piece in span).replace(f"\n{BETWEEN}", "\n")
        texts.append(f"{OPEN}{text}{CLOSE}" if is_target else text)
    return "".join(texts)
