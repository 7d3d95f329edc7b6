"""The sources of a mix become one pool, by weight, by rows or by epochs of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import lcm

import numpy as np

from finetune.config.sections.data import MixedSourceSection, TrainingSourceSection
from finetune.data.features import Features
from finetune.data.order.mixture import MixedOrder
from finetune.data.order.pool import Pool, Samples, fingerprint_of
from finetune.data.order.sample_ids import of_source, place_of, sources_of
from finetune.errors import DataError

LARGEST_WINDOW = 10_000
LARGEST_PASS = 200_000_000
"""Positions over which the counts of weighted sources are exact to one."""


def mixed(pools: Sequence[Pool], section: TrainingSourceSection, *, seed: int, unit: str) -> Pool:
    """Return the pools of `section.mix`, in its order, as one; `unit` is what stands at a position.

    Raises DataError for a weight that is too small to appear, and for `epochs` of a source of unknown size.
    """
    is_weighted = section.mix[0].weight is not None
    counts = _by_weight(section.mix) if is_weighted else _per_pass(section.mix, pools)
    if sum(counts) > LARGEST_PASS:
        raise DataError(
            f"data.train.mix: a pass over the mix has {sum(counts):,} {unit}, of which at most {LARGEST_PASS:,} are "
            "drawn at once. Write smaller `rows` or `epochs`; their proportions are what counts."
        )
    until = section.until if is_weighted else None
    order = MixedOrder([pool.order for pool in pools], counts, seed=seed, until=until)
    return Pool(
        samples=MixedSamples(tuple(pool.samples for pool in pools)),
        order=order,
        fingerprint=fingerprint_of("mix", [pool.fingerprint for pool in pools], counts, until),
        lines=partial(_told, tuple(pools), section.mix, order, unit=unit),
    )


@dataclass(frozen=True)
class MixedSamples:
    """The samples of several sources, by ids that tell which."""

    sources: tuple[Samples, ...]

    def __getitem__(self, sample_id: int) -> Features:
        """Return the sample of that id."""
        source, within = place_of(sample_id)
        return replace(self.sources[source][within], sample_id=sample_id)

    def place(self, sample_id: int) -> str:
        """Return where its row stands."""
        source, within = place_of(sample_id)
        return self.sources[source].place(within)

    def lengths_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the tokens of each sample."""
        return self._of_each(sample_ids, np.int64, lambda source, ids: source.lengths_of(ids))

    def marks_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the mark (uint64) of each sample's own arrays, as it was when it was made."""
        return self._of_each(sample_ids, np.uint64, lambda source, ids: source.marks_of(ids))

    def known_marks_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the mark (uint64) of what is delivered with each sample beside its own arrays."""
        return self._of_each(sample_ids, np.uint64, lambda source, ids: source.known_marks_of(ids))

    def problem(self) -> str | None:
        """Return what has been found to be damaged in a source by now."""
        return next((found for found in (source.problem() for source in self.sources) if found), None)

    def refuse(self, damaged: np.ndarray) -> tuple[str, ...]:
        """Return what is to be said of damage in each source; what is damaged on disk, too, is set aside by then."""
        each = [damaged[sources_of(damaged) == number] - of_source(number) for number in range(len(self.sources))]
        concerned = zip(self.sources, each, strict=True)
        return tuple(line for source, ids in concerned if len(ids) or source.problem() for line in source.refuse(ids))

    def _of_each(
        self, sample_ids: np.ndarray, dtype: type[np.generic], read: Callable[[Samples, np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Return what each sample's own source says of it."""
        sources, found = sources_of(sample_ids), np.empty(len(sample_ids), dtype)
        for number in np.unique(sources).tolist():
            here = sources == number
            found[here] = read(self.sources[number], sample_ids[here] - of_source(number))
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


def _per_pass(sections: Sequence[MixedSourceSection], pools: Sequence[Pool]) -> list[int]:
    return [
        section.rows if section.rows is not None else _of_epochs(section, pool, key=f"data.train.mix.{number}.epochs")
        for number, (section, pool) in enumerate(zip(sections, pools, strict=True))
    ]


def _of_epochs(section: MixedSourceSection, pool: Pool, *, key: str) -> int:
    assert section.epochs is not None  # the config's rules: each source has a weight, rows or epochs
    if pool.order.num_positions is None:
        raise DataError(f"{key}: nobody knows how long a stream is. Write `weight` or `rows` in all sources.")
    count = round(section.epochs * pool.order.num_positions)
    if count == 0:
        raise DataError(
            f"{key}: {section.epochs:g} of the source's {pool.order.num_positions:,} is less than one. "
            "Write more, or leave the source out."
        )
    return count


def _told(
    pools: Sequence[Pool],
    sections: Sequence[MixedSourceSection],
    order: MixedOrder,
    num_positions: int,
    *,
    unit: str,
) -> tuple[str, ...]:
    """Return what each source has of the run, and how often it is gone through."""
    lines: list[str] = []
    for number, count in enumerate(order.num_draws(num_positions)):
        source, pool = sections[number], pools[number]
        size = pool.order.num_positions
        passes = f"{count / size:.2f} passes over its {size:,}" if size else "of a stream"
        lines += [
            f"data.train.mix.{number} ({source.path or source.name}): {count:,} of {num_positions:,} {unit} in this "
            f"run ({count / num_positions:.1%}), {passes}",
            *pool.lines(count),
        ]
    return tuple(lines)
