"""Mixing: several sources become one dataset view, by weight, by rows or by epochs of each.

The source at a position is a pure function of the seed and the position.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from math import lcm

import numpy as np

from finetune.config.sections.data import MixedSourceSection, TrainingSourceSection
from finetune.data.features import Features
from finetune.data.order.order import (
    DatasetView,
    Order,
    Samples,
    fingerprint_of,
    shuffled_rows,
    source_offset,
    sources_of,
    split_sample_id,
)
from finetune.errors import DataError

_POSITIONS_PER_DRAW = 1024


class MixedOrder(Order):
    """An endless order of windows; in each, every source has a fixed number of positions, shuffled.

    Each of these takes the next position of the source's own order. The ids are the ids of `data/order/order.py`.
    An epoch ends when the first, or the last, source is exhausted; without weights, after a window.
    """

    def __init__(self, orders: Sequence[Order], counts: Sequence[int], *, seed: int, until: str | None) -> None:
        self._orders = orders
        self._counts = np.array(counts, np.int64)
        self._seed = seed
        self.window_size = int(self._counts.sum())
        self._windows_per_block = max(1, _POSITIONS_PER_DRAW // self.window_size)
        self._block = lru_cache(maxsize=2)(self._draw_block)
        self.num_positions = self.window_size if until is None else self._exhausted_after(until)

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the ids at positions [start, stop): in one array if each has one sample, else one by one."""
        sources, draws = self._draws(start, stop)
        spans: dict[int, tuple[int, int]] = {}  # the draws of a source are consecutive
        for source in np.unique(sources).tolist():
            of_source = draws[sources == source]
            spans[source] = (int(of_source[0]), int(of_source[-1]) + 1)
        ids = {source: self._orders[source].samples(*span) + source_offset(source) for source, span in spans.items()}
        if sum(map(len, ids.values())) == len(sources):
            mixed = np.empty(len(sources), np.int64)
            for source, source_ids in ids.items():
                mixed[sources == source] = source_ids
            yield mixed
            return
        iterators = {source: self._orders[source].cut(*span, 1) for source, span in spans.items()}
        yield from (next(iterators[source]) + source_offset(source) for source in sources.tolist())

    def num_draws(self, num_positions: int) -> list[int]:
        """Return, for each source, its number of positions among the first `num_positions`."""
        windows, rest = divmod(num_positions, self.window_size)
        sources, _ = self._draws(num_positions - rest, num_positions)
        counts = windows * self._counts + np.bincount(sources, minlength=len(self._counts))
        return [int(count) for count in counts]

    def _draws(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each position, and the position within that source's own order."""
        sources, draws = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        size = self._windows_per_block * self.window_size
        while start < stop:
            block, first = divmod(start, size)
            last = min(size, first + stop - start)
            block_sources, earlier = self._block(block)
            sources.append(block_sources[first:last])
            draws.append(earlier[first:last] + block * self._windows_per_block * self._counts[sources[-1]])
            start += last - first
        return np.concatenate(sources), np.concatenate(draws)

    def _draw_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each position of the block, and the number of earlier positions with the same source."""
        window = np.repeat(np.arange(len(self._counts)), self._counts)
        sources = window[shuffled_rows(self._windows_per_block, self.window_size, self._seed, "mix", block)].ravel()
        earlier = np.empty_like(sources)
        for source in range(len(self._counts)):
            positions = np.flatnonzero(sources == source)
            earlier[positions] = np.arange(len(positions))
        return sources, earlier

    def _exhausted_after(self, until: str) -> int | None:
        """Return the number of positions after which the first, or the last, source has completed one epoch."""
        sizes = [order.num_positions for order in self._orders]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        ends = []
        for source, size in enumerate(known):
            window, rest = divmod(size - 1, int(self._counts[source]))  # of its last position
            start = window * self.window_size
            sources, _ = self._draws(start, start + self.window_size)
            ends.append(start + int(np.flatnonzero(sources == source)[rest]) + 1)
        return min(ends) if until == "first" else max(ends)


MAX_WINDOW = 10_000
"""The number of positions over which the counts of weighted sources are exact to one."""

MAX_PASS = 200_000_000
"""The maximum number of positions in a pass over sources that have `rows` or `epochs`."""


def mixed_view(views: Sequence[DatasetView], section: TrainingSourceSection, *, seed: int, unit: str) -> DatasetView:
    """Return one view of the sources of `section.mix`, whose views are given in its order; `unit` names a position.

    Raises DataError for a weight that is too small to appear, and for `epochs` of a source of unknown size.
    """
    is_weighted = section.mix[0].weight is not None
    counts = _by_weight(section.mix) if is_weighted else _per_pass(section.mix, views)
    if sum(counts) > MAX_PASS:
        raise DataError(
            f"data.train.mix: a pass over the mix has {sum(counts):,} {unit}, but the limit is {MAX_PASS:,}. "
            "Write smaller `rows` or `epochs` in the same proportions."
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
class MixedSamples(Samples):
    """The samples of several sources; the ids contain the source."""

    sources: tuple[Samples, ...]

    def __getitem__(self, sample_id: int) -> Features:
        """Return the sample with that id."""
        source, within = split_sample_id(sample_id)
        return replace(self.sources[source][within], sample_id=sample_id)

    def location(self, sample_id: int) -> str:
        """Return the location of its row for messages."""
        source, within = split_sample_id(sample_id)
        return self.sources[source].location(within)

    def lengths_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each sample."""
        return self._read_by_source(sample_ids, np.int64, lambda source, ids: source.lengths_of(ids))

    def checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the checksum (uint64) of each sample's own arrays, computed when it was encoded."""
        return self._read_by_source(sample_ids, np.uint64, lambda source, ids: source.checksums_of(ids))

    def precomputed_checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the checksum (uint64) of each sample's precomputed arrays."""
        return self._read_by_source(sample_ids, np.uint64, lambda source, ids: source.precomputed_checksums_of(ids))

    def refuse(self, damaged: np.ndarray) -> tuple[str, ...]:
        """Return messages about the damage in each source; sets that are damaged on disk are quarantined."""
        lines: list[str] = []
        for number, source in enumerate(self.sources):
            ids = damaged[sources_of(damaged) == number] - source_offset(number)
            if len(ids):
                lines += source.refuse(ids)
        return tuple(lines)

    def _read_by_source(
        self, sample_ids: np.ndarray, dtype: type[np.generic], read: Callable[[Samples, np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Return the value that `read` gives for each sample in its own source."""
        sources, values = sources_of(sample_ids), np.empty(len(sample_ids), dtype)
        for number in np.unique(sources).tolist():
            is_from_source = sources == number
            values[is_from_source] = read(self.sources[number], sample_ids[is_from_source] - source_offset(number))
        return values


def _by_weight(sections: Sequence[MixedSourceSection]) -> list[int]:
    """Return the number of positions of each source in the smallest window that is exact, or in the largest window."""
    weights = [Fraction(str(section.weight)) for section in sections]
    shares = [weight / sum(weights) for weight in weights]
    window = min(lcm(*(share.denominator for share in shares)), MAX_WINDOW)
    counts = [int(share * window) for share in shares]
    remainders = [share * window - count for share, count in zip(shares, counts, strict=True)]
    by_remainder = sorted(range(len(shares)), key=lambda source: (-remainders[source], source))
    for source in by_remainder[: window - sum(counts)]:
        counts[source] += 1
    for number, (section, count) in enumerate(zip(sections, counts, strict=True)):
        if count == 0:
            raise DataError(
                f"data.train.mix.{number}.weight: {section.weight:g} is less than 1/{window} of the mix, so the source "
                "would never appear. Increase the weight, or remove the source."
            )
    return counts


def _per_pass(sections: Sequence[MixedSourceSection], views: Sequence[DatasetView]) -> list[int]:
    """Return the number of positions of each source in a pass over the mix, by its `rows` or `epochs`."""
    counts: list[int] = []
    for number, (section, view) in enumerate(zip(sections, views, strict=True)):
        if section.rows is not None:
            counts.append(section.rows)
            continue
        key, size = f"data.train.mix.{number}.epochs", view.order.num_positions
        assert section.epochs is not None  # config/rules: each source has a weight, rows or epochs
        if size is None:
            raise DataError(f"{key}: the length of a stream is unknown. Write `weight` or `rows` in all sources.")
        counts.append(round(section.epochs * size))
        if counts[-1] == 0:
            raise DataError(
                f"{key}: {section.epochs:g} of the source's {size:,} is less than one. "
                "Increase it, or remove the source."
            )
    return counts


def _describe_mix(
    views: Sequence[DatasetView],
    sections: Sequence[MixedSourceSection],
    order: MixedOrder,
    num_positions: int,
    *,
    unit: str,
) -> tuple[str, ...]:
    """Return the share of each source in the run, and its number of epochs."""
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
