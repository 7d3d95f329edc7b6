"""The samples that the model sees from a position of the data order on, in their microbatches."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.data.order.order import DatasetView
from finetune.data.templates.chat_template import is_special
from finetune.task.protocol import Task

REPLACEMENT_CHARACTER = "\ufffd"
"""The decoder's output for an incomplete character."""

MAX_CHARACTER_TOKENS = 8
"""The number of tokens after which an incomplete character is shown as is."""

MARKS = {" ": "·", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
"""Marks for whitespace; a newline is marked and kept."""

NO_TEXT = "∅"
WHITESPACE_MARKS = frozenset([*MARKS.values(), "↵", "\n"])


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

    @property
    def runs(self) -> list[tuple[str, bool]]:
        """Return the shown text split into text and whitespace marks, with whether a part is marks."""
        return [
            ("".join(characters), is_blank)
            for is_blank, characters in groupby(self.shown, key=WHITESPACE_MARKS.__contains__)
        ]


def visible(text: str) -> str:
    """Return the text with visible whitespace, and with codes for other characters that are not printable.

    >>> visible("a b")
    'a·b'
    """
    marks = {**MARKS, "\n": "↵\n"}
    texts = (marks.get(one, one if one.isprintable() else f"⟨{ord(one):02X}⟩") for one in text)
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


def spans(pieces: Sequence[Piece]) -> list[tuple[bool, list[Piece]]]:
    """Return the alternating spans of targets and context: whether the pieces are targets, and the pieces."""
    return [(is_target, list(span)) for is_target, span in groupby(pieces, key=lambda piece: piece.is_target)]


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    if not ids:
        return ""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@dataclass(frozen=True)
class PreviewSample:
    """A sample, the location of its row, and its tokens as text."""

    sample_id: int
    location: str
    pieces: tuple[Piece, ...]
    num_tokens: int
    num_targets: int
    answer: str = ""  # the target as text, if it is not a token


@dataclass(frozen=True)
class PreviewPosition:
    """One position of the order: a sample, a pack, or a batch by tokens."""

    number: int
    samples: tuple[PreviewSample, ...]  # the samples to show
    num_samples: int  # of the whole position, as num_tokens
    num_tokens: int


@dataclass(frozen=True)
class PreviewBatch:
    """A microbatch; the numbers cover all of it, even if only some samples are shown."""

    step: int  # from 1
    number: int  # in its step, from 1
    of: int  # microbatches of the step, over the whole world
    first_position: int
    last_position: int
    positions: tuple[PreviewPosition, ...]
    num_samples: int
    num_tokens: int
    num_targets: int
    num_lanes: int  # rows of the forward pass: one per sample, or one that joins all end to end
    num_computed: int  # positions of all rows, including padding

    @property
    def padding_share(self) -> float:
        """Return the share of computed positions that are padding."""
        return 1 - self.num_tokens / self.num_computed if self.num_computed else 0.0

    @property
    def is_padded(self) -> bool:
        """Return whether each sample has its own row, padded to the length of the longest."""
        return self.num_lanes == self.num_samples

    @property
    def num_shown(self) -> int:
        """Return the number of shown samples."""
        return sum(len(position.samples) for position in self.positions)


@dataclass(frozen=True)
class BatchPreview:
    """A dataset view with the batch sizes that divide a step."""

    view: DatasetView
    task: Task
    tokenizer: Any
    global_batch_size: int
    microbatch_size: int

    def batches(self, *, start: int, num_samples: int) -> Iterator[PreviewBatch]:
        """Yield microbatches from the one that holds position `start`, until `num_samples` samples are shown."""
        first = start
        while num_samples > 0:
            batch = self._batch(first, max_samples=num_samples)
            yield batch
            num_samples -= sum(len(position.samples) for position in batch.positions)
            first = first // self.microbatch_size * self.microbatch_size + self.microbatch_size

    def _batch(self, first: int, *, max_samples: int) -> PreviewBatch:
        start = first // self.microbatch_size * self.microbatch_size
        end = start + self.microbatch_size
        batch = self._collated(start, end)
        step, offset = divmod(start, self.global_batch_size)
        return PreviewBatch(
            step=step + 1,
            number=offset // self.microbatch_size + 1,
            of=self.global_batch_size // self.microbatch_size,
            first_position=start,
            last_position=end - 1,
            positions=tuple(self._positions(first, end, max_samples=max_samples)),
            num_samples=len(batch.sample_ids),
            num_tokens=batch.num_tokens,
            num_targets=batch.num_targets,
            num_lanes=batch.positions[0],
            num_computed=math.prod(batch.positions),
        )

    def _collated(self, start: int, end: int) -> Batch:
        (ids,) = self.view.order.cut(start, end, self.microbatch_size)
        return self.task.collate([self.view.samples[sample_id] for sample_id in ids.tolist()])

    def _positions(self, start: int, stop: int, *, max_samples: int) -> Iterator[PreviewPosition]:
        for number in range(start, stop):
            if max_samples <= 0:
                return
            ids = self.view.order.samples(number, number + 1)
            shown = tuple(self._sample(sample_id) for sample_id in ids[:max_samples].tolist())
            yield PreviewPosition(number, shown, len(ids), int(self.view.samples.lengths_of(ids).sum()))
            max_samples -= len(ids)

    def _sample(self, sample_id: int) -> PreviewSample:
        features = self.view.samples[sample_id]
        pieces = tuple(pieces_of(features, self.tokenizer))
        location, answer = self.view.samples.location(sample_id), self.task.label_text(features)
        return PreviewSample(sample_id, location, pieces, features.length, features.num_targets, answer)
