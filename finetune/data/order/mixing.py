"""The sources of a mix become one dataset view, by weight, by rows or by epochs of each.

Which source stands at which position is a pure function of the seed and the position.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from math import lcm

import numpy as np

from finetune.config.sections.data import MixedSourceSection, TrainingSourceSection
from finetune.data.features import Features
from finetune.data.order.dataset_view import (
    DatasetView,
    Samples,
    fingerprint_of,
    source_offset,
    sources_of,
    split_sample_id,
)
from finetune.data.order.order import Order, PiecewiseOrder, shuffled_rows
from finetune.errors import DataError

_POSITIONS_DRAWN_AT_ONCE = 1024


class MixedOrder(PiecewiseOrder):
    """An endless order of windows, in each of which every source has its count of positions, shuffled.

    What stands there is the next position of the source's own order, so each source is gone through in that order.
    Ids are those of `data/order/dataset_view.py`.
    """

    def __init__(self, orders: Sequence[Order], counts: Sequence[int], *, seed: int, until: str | None) -> None:
        self._orders = orders
        self._counts = np.array(counts, np.int64)
        self._seed = seed
        self.window_size = int(self._counts.sum())
        self._windows_at_once = max(1, _POSITIONS_DRAWN_AT_ONCE // self.window_size)
        self._block = lru_cache(maxsize=2)(self._drawn_block)
        self._num_positions = self.window_size if until is None else self._used_up(until)

    @property
    def num_positions(self) -> int | None:
        """Return the positions until the first source, or the last, is used up; without weights, those of a window."""
        return self._num_positions

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the ids at positions [start, stop): at once where each holds one sample, else position by position."""
        sources, draws = self._draws(start, stop)
        taken = {int(source): _span(draws[sources == source]) for source in np.unique(sources)}
        ids = {source: self._orders[source].samples(*span) + source_offset(source) for source, span in taken.items()}
        if sum(map(len, ids.values())) == len(sources):
            mixed = np.empty(len(sources), np.int64)
            for source, of_its in ids.items():
                mixed[sources == source] = of_its
            yield mixed
            return
        each = {source: self._orders[source].cut(*span, 1) for source, span in taken.items()}
        yield from (next(each[source]) + source_offset(source) for source in sources.tolist())

    def num_draws(self, num_positions: int) -> list[int]:
        """Return how many of the first `num_positions` positions each source has."""
        windows, rest = divmod(num_positions, self.window_size)
        sources, _ = self._draws(num_positions - rest, num_positions)
        counts = windows * self._counts + np.bincount(sources, minlength=len(self._counts))
        return [int(count) for count in counts]

    def _draws(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for each position its source and which of that source's positions it is."""
        sources, draws = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        size = self._windows_at_once * self.window_size
        while start < stop:
            block, first = divmod(start, size)
            last = min(size, first + stop - start)
            of_block, rank = self._block(block)
            sources.append(of_block[first:last])
            draws.append(rank[first:last] + block * self._windows_at_once * self._counts[sources[-1]])
            start += last - first
        return np.concatenate(sources), np.concatenate(draws)

    def _drawn_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each position in the block, and how many of that source stand before it in the block."""
        of_window = np.repeat(np.arange(len(self._counts)), self._counts)
        sources = of_window[shuffled_rows(self._windows_at_once, self.window_size, self._seed, "mix", block)].ravel()
        rank = np.empty_like(sources)
        for source in range(len(self._counts)):
            here = np.flatnonzero(sources == source)
            rank[here] = np.arange(len(here))
        return sources, rank

    def _used_up(self, until: str) -> int | None:
        """Return the positions after which the first source has been gone through once, or the last."""
        sizes = [order.num_positions for order in self._orders]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        ends = [self._position_of(source, size - 1) + 1 for source, size in enumerate(known)]
        return min(ends) if until == "first" else max(ends)

    def _position_of(self, source: int, draw: int) -> int:
        window, rest = divmod(draw, int(self._counts[source]))
        start = window * self.window_size
        sources, _ = self._draws(start, start + self.window_size)
        return start + int(np.flatnonzero(sources == source)[rest])


def _span(draws: np.ndarray) -> tuple[int, int]:
    """Return where these draws, which follow one another, begin and end."""
    return int(draws[0]), int(draws[-1]) + 1


LARGEST_WINDOW = 10_000
LARGEST_PASS = 200_000_000
"""Positions over which the counts of weighted sources are exact to one."""


def mixed_view(views: Sequence[DatasetView], section: TrainingSourceSection, *, seed: int, unit: str) -> DatasetView:
    """Return the dataset views of `section.mix`, in its order, as one; `unit` is what stands at a position.

    Raises DataError for a weight that is too small to appear, and for `epochs` of a source of unknown size.
    """
    is_weighted = section.mix[0].weight is not None
    counts = _by_weight(section.mix) if is_weighted else _per_pass(section.mix, views)
    if sum(counts) > LARGEST_PASS:
        raise DataError(
            f"data.train.mix: a pass over the mix has {sum(counts):,} {unit}, of which at most {LARGEST_PASS:,} are "
            "drawn at once. Write smaller `rows` or `epochs`; their proportions are what counts."
        )
    until = section.until if is_weighted else None
    order = MixedOrder([view.order for view in views], counts, seed=seed, until=until)
    return DatasetView(
        samples=MixedSamples(tuple(view.samples for view in views)),
        order=order,
        fingerprint=fingerprint_of("mix", [view.fingerprint for view in views], counts, until),
        lines=partial(_describe_mix, tuple(views), section.mix, order, unit=unit),
    )


@dataclass(frozen=True)
class MixedSamples:
    """The samples of several sources, by ids that tell which."""

    sources: tuple[Samples, ...]

    def __getitem__(self, sample_id: int) -> Features:
        """Return the sample of that id."""
        source, within = split_sample_id(sample_id)
        return replace(self.sources[source][within], sample_id=sample_id)

    def place(self, sample_id: int) -> str:
        """Return where its row stands."""
        source, within = split_sample_id(sample_id)
        return self.sources[source].place(within)

    def lengths_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the tokens of each sample."""
        return self._of_each(sample_ids, np.int64, lambda source, ids: source.lengths_of(ids))

    def checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the mark (uint64) of each sample's own arrays, as it was when it was made."""
        return self._of_each(sample_ids, np.uint64, lambda source, ids: source.checksums_of(ids))

    def precomputed_checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the mark (uint64) of what is delivered with each sample next to its own arrays."""
        return self._of_each(sample_ids, np.uint64, lambda source, ids: source.precomputed_checksums_of(ids))

    def problem(self) -> str | None:
        """Return what has been found to be damaged in a source by now."""
        return next((found for found in (source.problem() for source in self.sources) if found), None)

    def refuse(self, damaged: np.ndarray) -> tuple[str, ...]:
        """Return messages on damage in each source; what is damaged on disk, too, is set aside."""
        each = [damaged[sources_of(damaged) == number] - source_offset(number) for number in range(len(self.sources))]
        concerned = zip(self.sources, each, strict=True)
        return tuple(line for source, ids in concerned if len(ids) or source.problem() for line in source.refuse(ids))

    def _of_each(
        self, sample_ids: np.ndarray, dtype: type[np.generic], read: Callable[[Samples, np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Return what each sample's own source says of it."""
        sources, found = sources_of(sample_ids), np.empty(len(sample_ids), dtype)
        for number in np.unique(sources).tolist():
            here = sources == number
            found[here] = read(self.sources[number], sample_ids[here] - source_offset(number))
        return found


def _by_weight(sections: Sequence[MixedSourceSection]) -> list[int]:
    """Return the positions of each source in a window: as few as are exact, else the largest window's."""
    weights = [Fraction(str(section.weight)) for section in sections]
    shares = [weight / sum(weights) for weight in weights]
    window = min(lcm(*(share.denominator for share in shares)), LARGEST_WINDOW)
    counts = _largest_remainders(shares, window)
    for number, (section, count) in enumerate(zip(sections, counts, strict=True)):
        if count == 0:
            raise DataError(
                f"data.train.mix.{number}.weight: {section.weight:g} is less than one in {window:,} of the mix, so "
                "the source would never appear. Write a larger one, or leave the source out."
            )
    return counts


def _largest_remainders(shares: Sequence[Fraction], size: int) -> list[int]:
    """Return whole numbers with this sum that are nearest to the shares (Hamilton's method)."""
    counts = [int(share * size) for share in shares]
    remainders = [share * size - count for share, count in zip(shares, counts, strict=True)]
    by_remainder = sorted(range(len(shares)), key=lambda source: (-remainders[source], source))
    for source in by_remainder[: size - sum(counts)]:
        counts[source] += 1
    return counts


def _per_pass(sections: Sequence[MixedSourceSection], views: Sequence[DatasetView]) -> list[int]:
    return [
        section.rows if section.rows is not None else _of_epochs(section, view, key=f"data.train.mix.{number}.epochs")
        for number, (section, view) in enumerate(zip(sections, views, strict=True))
    ]


def _of_epochs(section: MixedSourceSection, view: DatasetView, *, key: str) -> int:
    assert section.epochs is not None  # the config's rules: each source has a weight, rows or epochs
    if view.order.num_positions is None:
        raise DataError(f"{key}: the length of a stream is unknown. Write `weight` or `rows` in all sources.")
    count = round(section.epochs * view.order.num_positions)
    if count == 0:
        raise DataError(
            f"{key}: {section.epochs:g} of the source's {view.order.num_positions:,} is less than one. "
            "Increase it, or remove the source."
        )
    return count


def _describe_mix(
    views: Sequence[DatasetView],
    sections: Sequence[MixedSourceSection],
    order: MixedOrder,
    num_positions: int,
    *,
    unit: str,
) -> tuple[str, ...]:
    """Return what each source has of the run, and how often it is gone through."""
    lines: list[str] = []
    for number, count in enumerate(order.num_draws(num_positions)):
        source, view = sections[number], views[number]
        size = view.order.num_positions
        passes = f"{count / size:.2f} passes over its {size:,}" if size else "of a stream"
        lines += [
            f"data.train.mix.{number} ({source.path or source.name}): {count:,} of {num_positions:,} {unit} in this "
            f"run ({count / num_positions:.1%}), {passes}",
            *view.lines(count),
        ]
    return tuple(lines)
