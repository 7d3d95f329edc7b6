"""The samples that the model sees from a position of the data order on, in their microbatches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from finetune.commands.preview.tokens import Piece, pieces_of
from finetune.data.batch import Batch
from finetune.data.order.dataset_view import DatasetView
from finetune.task.protocol import Task


@dataclass(frozen=True)
class PreviewSample:
    """One sample, where its row stands, and its tokens as text."""

    sample_id: int
    place: str
    pieces: tuple[Piece, ...]
    num_tokens: int
    num_targets: int
    answer: str = ""  # what is to be found out, where no token says it


@dataclass(frozen=True)
class PreviewPosition:
    """What stands at one position of the order: a sample, a pack, or a batch by tokens."""

    number: int
    samples: tuple[PreviewSample, ...]  # that are shown
    num_samples: int  # of all of it, as num_tokens
    num_tokens: int


@dataclass(frozen=True)
class PreviewBatch:
    """One microbatch; its numbers are of all of it, however much is shown."""

    step: int  # from 1, as everywhere
    number: int  # in its step, from 1
    of: int  # microbatches of the step, over the whole world
    first_position: int
    last_position: int
    positions: tuple[PreviewPosition, ...]
    num_samples: int
    num_tokens: int
    num_targets: int
    num_lanes: int  # rows of the forward pass: one for each sample, or one in which all lie end to end
    num_computed: int  # positions of all of them, padding included

    @property
    def padding_share(self) -> float:
        """Return the share of padding in what is computed."""
        return 1 - self.num_tokens / self.num_computed if self.num_computed else 0.0

    @property
    def is_padded(self) -> bool:
        """Return whether each sample has a lane of its own, filled up to the length of the longest."""
        return self.num_lanes == self.num_samples

    @property
    def num_shown(self) -> int:
        """Return how many of its samples are shown."""
        return sum(len(position.samples) for position in self.positions)


@dataclass(frozen=True)
class BatchPreview:
    """An order, the samples at its positions, and how a step is cut."""

    pool: DatasetView
    task: Task
    tokenizer: Any
    global_batch_size: int
    microbatch_size: int

    def batches(self, *, start: int, num_samples: int) -> Iterator[PreviewBatch]:
        """Yield microbatches from the one that holds position `start`, until this number of samples has been shown."""
        first = start
        while num_samples > 0:
            batch = self._batch(first, most=num_samples)
            yield batch
            num_samples -= sum(len(position.samples) for position in batch.positions)
            first = first // self.microbatch_size * self.microbatch_size + self.microbatch_size

    def _batch(self, first: int, *, most: int) -> PreviewBatch:
        begin = first // self.microbatch_size * self.microbatch_size
        end = begin + self.microbatch_size
        batch = self._collated(begin, end)
        step, offset = divmod(begin, self.global_batch_size)
        return PreviewBatch(
            step=step + 1,
            number=offset // self.microbatch_size + 1,
            of=self.global_batch_size // self.microbatch_size,
            first_position=begin,
            last_position=end - 1,
            positions=tuple(self._positions(first, end, most=most)),
            num_samples=len(batch.sample_ids),
            num_tokens=batch.num_tokens,
            num_targets=batch.num_targets,
            num_lanes=batch.positions[0],
            num_computed=math.prod(batch.positions),
        )

    def _collated(self, begin: int, end: int) -> Batch:
        """Return the batch as a rank is handed it."""
        (ids,) = self.pool.order.cut(begin, end, self.microbatch_size)
        return self.task.collate([self.pool.samples[sample_id] for sample_id in ids.tolist()])

    def _positions(self, start: int, stop: int, *, most: int) -> Iterator[PreviewPosition]:
        for number in range(start, stop):
            if most <= 0:
                return
            ids = self.pool.order.samples(number, number + 1)
            shown = tuple(self._sample(sample_id) for sample_id in ids[:most].tolist())
            yield PreviewPosition(number, shown, len(ids), int(self.pool.samples.lengths_of(ids).sum()))
            most -= len(ids)

    def _sample(self, sample_id: int) -> PreviewSample:
        features = self.pool.samples[sample_id]
        pieces = tuple(pieces_of(features, self.tokenizer))
        location, answer = self.pool.samples.place(sample_id), self.task.label_text(features)
        return PreviewSample(sample_id, location, pieces, features.length, features.num_targets, answer)
