"""The order of samples as a pure function of (seed, epoch, position), and views: samples by id in such an order.

A position counts over the whole world. An id encodes the source, the window of a stream, and the index of the sample in
one integer. For a job with a single source that is not a stream, the ids are the indices of its prepared set.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from finetune.config.sections.data import BatchingSection
from finetune.data.features import Features
from finetune.runtime.seeds import derive_seed

LengthsOf = Callable[[np.ndarray], np.ndarray]
"""From sample ids to the number of tokens of each."""


class Order(ABC):
    """An endless sequence of positions with one or more samples each; a pure function of the position."""

    num_positions: int | None  # of one epoch; None if it is unknown, as for a stream

    @abstractmethod
    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the ids (int64) at positions [start, stop) in pieces of any size, such as epoch by epoch."""

    def samples(self, start: int, stop: int) -> np.ndarray:
        """Return the ids (int64) of all samples at positions [start, stop), in the order of the positions."""
        return np.concatenate([np.zeros(0, np.int64), *self.pieces(start, stop)])

    def cut(self, start: int, stop: int, size: int) -> Iterator[np.ndarray]:
        """Yield the same ids in pieces of `size` positions each: the contents of the microbatches."""
        return (self.samples(first, min(first + size, stop)) for first in range(start, stop, size))


@dataclass(frozen=True)
class SetOrder(Order):
    """An endless sequence of sample ids; each epoch contains every sample once, at a position of its own."""

    seed: int
    num_positions: int
    shuffle: bool = True

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the sample ids at positions [start, stop), epoch by epoch."""
        while start < stop:
            epoch, first = divmod(start, self.num_positions)
            last = min(self.num_positions, first + stop - start)
            yield _epoch_ids(self.seed, self.num_positions, epoch if self.shuffle else None)[first:last]
            start += last - first


def steps_for_tokens(
    order: Order, lengths_of: LengthsOf, *, epoch_tokens: int | None, global_batch_size: int, tokens: int
) -> int:
    """Return the smallest number of optimizer steps whose samples have at least `tokens` (>= 1) tokens in total.

    With `epoch_tokens`, whole epochs are not counted sample by sample; None if epochs may differ.
    """
    start, missing = 0, tokens
    if epoch_tokens is not None and order.num_positions is not None:
        whole_epochs, rest = divmod(tokens - 1, epoch_tokens)
        start = whole_epochs * order.num_positions // global_batch_size * global_batch_size
        earlier = order.samples(start, whole_epochs * order.num_positions)
        missing = rest + 1 + int(lengths_of(earlier).sum())
    while missing > 0:
        missing -= int(lengths_of(order.samples(start, start + global_batch_size)).sum())
        start += global_batch_size
    return start // global_batch_size


def permutation(size: int, *parts: int | str) -> np.ndarray:
    """Return a permutation derived from the parts, using raw bits of PCG64, which are stable across NumPy (NEP 19)."""
    if size == 1:
        return np.zeros(1, np.int64)
    return np.concatenate(shuffled_rows(1, size, *parts))


def shuffled_rows(num_rows: int, size: int, *parts: int | str) -> np.ndarray:
    """Return `num_rows` permutations, one per row, derived from the parts."""
    bits = np.random.PCG64(derive_seed(*parts)).random_raw(num_rows * size).reshape(num_rows, size)
    return np.argsort(bits, kind="stable").astype(np.int64)


@lru_cache(maxsize=2)
def _epoch_ids(seed: int, num_samples: int, epoch: int | None) -> np.ndarray:
    """Return the ids in the order of the epoch, read-only; the same in every epoch if unshuffled (None)."""
    unshuffled = np.arange(num_samples, dtype=np.int64)
    ids = unshuffled if epoch is None else permutation(num_samples, seed, "order", epoch)
    ids.setflags(write=False)
    return ids


INDEX_BITS, WINDOW_BITS = 24, 24
"""A window of a stream has up to 16 million samples, a stream up to 16 million windows."""


class SourceSampleId(NamedTuple):
    """The two parts of a sample id; for a source that is not a stream, `within` is the index in its prepared set."""

    source: int
    within: int  # the sample's id within its source


def source_offset(source: int) -> int:
    """Return the offset that is added to ids within this source."""
    return source << (INDEX_BITS + WINDOW_BITS)


def window_offset(window: int) -> int:
    """Return the offset that is added to indices within this window of a stream."""
    return window << INDEX_BITS


def split_sample_id(sample_id: int) -> SourceSampleId:
    """Return the source and the id within that source.

    >>> split_sample_id(source_offset(2) + 7)
    SourceSampleId(source=2, within=7)
    """
    source = sample_id >> (INDEX_BITS + WINDOW_BITS)
    return SourceSampleId(source, sample_id - source_offset(source))


def sources_of(sample_ids: np.ndarray) -> np.ndarray:
    """Return the source of each id."""
    return sample_ids >> (INDEX_BITS + WINDOW_BITS)


def split_stream_index(within: int) -> tuple[int, int]:
    """Return the window of a sample of a stream, and the index in that window.

    >>> split_stream_index(window_offset(2) + 7)
    (2, 7)
    """
    return within >> INDEX_BITS, within & ((1 << INDEX_BITS) - 1)


class Samples(ABC):
    """Encoded samples by id; cheap to pickle, since a loader process reopens the files."""

    @abstractmethod
    def __getitem__(self, sample_id: int) -> Features:
        """Return the sample with that id."""

    @abstractmethod
    def location(self, sample_id: int) -> str:
        """Return the location of its row for messages, such as `train.jsonl, row 17`."""

    @abstractmethod
    def lengths_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each sample."""

    @abstractmethod
    def checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the checksum (uint64) of each sample's own arrays, computed when it was encoded."""

    def precomputed_checksums_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the checksum (uint64) of each sample's precomputed arrays; 0 without such arrays."""
        return np.zeros(len(sample_ids), np.uint64)

    @abstractmethod
    def refuse(self, damaged: np.ndarray) -> tuple[str, ...]:
        """Return messages about samples that the loader delivered damaged.

        Sets that are also damaged on disk have been quarantined when this returns.
        """


@dataclass(frozen=True)
class DatasetView:
    """The samples of one or several sources, and their order."""

    samples: Samples
    order: Order
    fingerprint: str  # changes with the samples and with their positions
    epoch_tokens: int | None = None  # tokens of every epoch; None if epochs differ or the number is unknown
    lines: Callable[[int], tuple[str, ...]] = lambda num_positions: ()  # describes the first N positions to the user


def fingerprint_of(*parts: object) -> str:
    """Return a digest of values that can be written as JSON."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


class SampleGroups(NamedTuple):
    """Samples in groups; group g holds `members[starts[g]:starts[g + 1]]`."""

    members: np.ndarray  # indices into the lengths, each exactly once, group by group
    starts: np.ndarray  # [num_groups + 1]

    @property
    def num_groups(self) -> int:
        """Return the number of groups."""
        return len(self.starts) - 1


Grouping = Callable[[np.ndarray], SampleGroups]
"""From lengths to groups; the number of groups does not depend on the order of the lengths."""


def best_fit_decreasing(lengths: np.ndarray, *, budget: int) -> SampleGroups:
    """Return packs of at most `budget` tokens: samples, longest first, each go into the fullest pack they fit into.

    Samples of equal length are packed together, in their order, so the cost is that of sorting. Raises ValueError for
    a sample longer than the budget.
    """
    if len(lengths) and int(lengths.max()) > budget:
        raise ValueError(f"a sample of {int(lengths.max())} tokens in packs of {budget}")
    packs = np.empty(len(lengths), np.int64)
    num_packs = 0
    open_packs: dict[int, list[np.ndarray]] = {}  # that are not full, by the number of tokens that still fit
    spaces = 0  # bit r is set if there are packs with room for r tokens
    longest_first = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    of_equal_length = np.split(longest_first, np.cumsum(counts[::-1])[:-1])
    for length, members in zip(distinct[::-1].tolist(), of_equal_length, strict=False):
        while len(members):
            fitting = spaces >> length
            if fitting:
                space = length + (fitting & -fitting).bit_length() - 1
                spaces ^= 1 << space
                fitting_packs = np.concatenate(open_packs.pop(space))
            else:
                first_new, space = num_packs, budget
                num_packs += -(-len(members) // (budget // length))
                fitting_packs = np.arange(first_new, num_packs, dtype=np.int64)
            # a pack is filled with as many as fit: after one of these samples it has less space, so it still fits best
            samples_per_pack = space // length
            used, unused = np.split(fitting_packs, [-(-len(members) // samples_per_pack)])
            num_added = min(len(members), len(used) * samples_per_pack)
            packs[members[:num_added]] = np.repeat(used, samples_per_pack)[:num_added]
            num_in_last = num_added - (len(used) - 1) * samples_per_pack
            for kept, rest in (
                (used[:-1], space - samples_per_pack * length),
                (used[-1:], space - num_in_last * length),
                (unused, space),
            ):
                if len(kept) and rest:
                    open_packs.setdefault(rest, []).append(kept)
                    spaces |= 1 << rest
            members = members[num_added:]
    order = np.argsort(packs, kind="stable")
    sizes = np.bincount(packs, minlength=num_packs)
    return SampleGroups(order, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def batches_by_tokens(lengths: np.ndarray, *, budget: int) -> SampleGroups:
    """Return batches of samples of similar length with at most `budget` tokens each, padding included.

    A longer sample forms a batch of its own.
    """
    order = np.argsort(-lengths, kind="stable")
    longest_first = lengths[order].tolist()
    starts = [0]
    while starts[-1] < len(longest_first):
        starts.append(starts[-1] + max(1, budget // longest_first[starts[-1]]))
    starts[-1] = len(longest_first)
    return SampleGroups(order, np.array(starts, np.int64))


WINDOW_SAMPLES = 1 << 20
"""The number of samples that are packed together; a larger set is packed window by window."""


def set_order(lengths: np.ndarray, *, seed: int, shuffle: bool, batching: BatchingSection, max_length: int) -> Order:
    """Return the endless order of samples of these lengths; each epoch contains every sample once.

    `batching.length_window_steps` is applied to the whole mix later, by `LengthGroupedOrder`.
    """
    if batching.by == "samples":
        return SetOrder(seed=seed, num_positions=len(lengths), shuffle=shuffle)
    grouping = best_fit_decreasing if batching.by == "packs" else batches_by_tokens
    budget = token_budget(batching, max_length=max_length)
    return GroupedOrder(lengths, partial(grouping, budget=budget), seed=seed, shuffle=shuffle)


def token_budget(batching: BatchingSection, *, max_length: int) -> int:
    """Return the token budget of a pack, or of a batch by tokens."""
    return batching.tokens if batching.tokens is not None else max_length


class GroupedOrder(Order):
    """An endless sequence of groups of samples; each epoch contains every sample once.

    Windows hold the same samples in all epochs, so every epoch has the same number of groups. In each epoch the
    samples of a window are regrouped and the groups shuffled, as a function of (seed, epoch, window).
    """

    num_positions: int  # the number of groups

    def __init__(
        self,
        lengths: np.ndarray,
        group: Grouping,
        *,
        seed: int,
        shuffle: bool,
        window_samples: int = WINDOW_SAMPLES,
    ) -> None:
        self._lengths = np.array(lengths)  # a copy: later damage on disk must not change the groups
        self._group = group
        self._seed = seed
        self._shuffle = shuffle
        self._num_windows = -(-len(lengths) // window_samples)
        self._window_samples = window_samples
        self._windows = cache(partial(permutation, len(lengths), seed, "windows"))
        self._grouped = lru_cache(maxsize=2)(self._compute_groups)
        counts = [self._group(self._lengths[self._window(number)]).num_groups for number in range(self._num_windows)]
        self._ends = np.cumsum(counts)  # of each window's positions within an epoch
        self.num_positions = sum(counts)

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the samples at positions [start, stop)."""
        while start < stop:
            epoch, position = divmod(start, self.num_positions)
            window = int(np.searchsorted(self._ends, position, side="right"))
            end = int(self._ends[window])
            ids, starts = self._grouped(epoch, window)
            first = position - end + len(starts) - 1
            last = min(len(starts) - 1, first + stop - start)
            yield ids[starts[first] : starts[last]]
            start += last - first

    def _compute_groups(self, epoch: int, window: int) -> SampleGroups:
        """Return the window's groups of sample ids in the order of the epoch."""
        ids = self._window(window)
        if self._shuffle:
            ids = ids[permutation(len(ids), self._seed, "order", epoch, window)]
        groups = self._group(self._lengths[ids])
        members = ids[groups.members]
        if self._shuffle:
            group_order = permutation(groups.num_groups, self._seed, "groups", epoch, window)
        else:
            group_order = np.argsort(np.minimum.reduceat(members, groups.starts[:-1]), kind="stable")
        sizes = np.diff(groups.starts)[group_order]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        indices = np.repeat(groups.starts[:-1][group_order] - starts[:-1], sizes) + np.arange(len(members))
        return SampleGroups(members[indices], starts)

    def _window(self, number: int) -> np.ndarray:
        """Return the ids of the window's samples, in the order of the set."""
        indices = slice(number * self._window_samples, (number + 1) * self._window_samples)
        num_samples = len(self._lengths)
        if self._num_windows == 1 or not self._shuffle:
            return np.arange(num_samples, dtype=np.int64)[indices]
        return np.sort(self._windows()[indices])


class LengthGroupedOrder(Order):
    """An order whose samples are sorted by length within windows of `window_steps` steps.

    With a window of one step, every step keeps its samples and its loss. With a larger window, each step gets samples
    of similar length, and the steps are shuffled. Samples stay in their epoch.
    """

    def __init__(
        self, order: Order, lengths_of: LengthsOf, *, seed: int, global_batch_size: int, window_steps: int
    ) -> None:
        self.unsorted = order  # each window holds the same samples in both orders
        self.num_positions = order.num_positions
        self.window_positions = global_batch_size * window_steps
        self._lengths_of = lengths_of
        self._seed = seed
        self._step_size = global_batch_size
        self._sorted = lru_cache(maxsize=8)(self._compute_sorted)  # the loader is some steps ahead of the check of ids

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the samples at positions [start, stop)."""
        while start < stop:
            window, first = divmod(start, self.window_positions)
            last = min(self.window_positions, first + stop - start)
            yield self._sorted(window)[first:last]
            start += last - first

    def _compute_sorted(self, window: int) -> np.ndarray:
        start, stop = window * self.window_positions, (window + 1) * self.window_positions
        ends = _multiples(self.unsorted.num_positions, start, stop) if self.unsorted.num_positions else []
        pieces: list[np.ndarray] = []
        for first, last in pairwise([start, *ends, stop]):  # of one epoch each
            ids = self.unsorted.samples(first, last)
            ids = ids[np.argsort(-self._lengths_of(ids), kind="stable")]
            edges = [first, *_multiples(self._step_size, first, last), last]
            part_order = permutation(len(edges) - 1, self._seed, "lengths", first)  # of the parts of the sorted samples
            sizes = np.empty_like(part_order)
            sizes[part_order] = np.diff(edges)
            parts = np.split(ids, np.cumsum(sizes)[:-1])
            pieces += [parts[number] for number in part_order]
        return np.concatenate(pieces)


class LongestFirstOrder(Order):
    """The samples of a set from the longest to the shortest, for computations that do not depend on the order."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._ids = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
        self.num_positions = len(lengths)

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the samples at positions [start, stop) of the only epoch."""
        yield self._ids[start:stop]


def _multiples(of: int, start: int, stop: int) -> list[int]:
    """Return the multiples of `of` strictly between start and stop."""
    return list(range((start // of + 1) * of, stop, of))
