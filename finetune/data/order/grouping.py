"""The order of one set of samples: one by one, in packs, in batches by tokens, or grouped by length."""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from finetune.config.sections.data import BatchingSection
from finetune.data.order.order import LengthsOf, Order, PiecewiseOrder, SetOrder, concatenated, permutation


class SampleGroups(NamedTuple):
    """Samples put into groups; group g holds `members[starts[g]:starts[g + 1]]`."""

    members: np.ndarray  # places in the lengths given, each once, group after group
    starts: np.ndarray  # one more than there are groups

    @property
    def num_groups(self) -> int:
        """Return how many groups there are."""
        return len(self.starts) - 1


Grouping = Callable[[np.ndarray], SampleGroups]
"""From lengths to groups, whose number follows from the lengths alone, in whatever order they come."""


def best_fit_decreasing(lengths: np.ndarray, *, budget: int) -> SampleGroups:
    """Return packs of at most `budget` tokens: from the longest sample on, each goes where the least room is left.

    All samples of one length are placed together, so the time is that of sorting them. Among samples of one length
    those that come first are placed first. Raises ValueError for a sample longer than the budget.
    """
    if len(lengths) and int(lengths.max()) > budget:
        raise ValueError(f"a sample of {int(lengths.max())} tokens in packs of {budget}")
    packs = np.empty(len(lengths), np.int64)
    rooms = _OpenPacks(budget)
    for length, members in _by_length(lengths):
        while len(members):
            members = rooms.place(members, length=length, packs=packs)
    order = np.argsort(packs, kind="stable")
    counts = np.bincount(packs, minlength=rooms.num_packs)
    return SampleGroups(order, _starts(counts))


def batches_by_tokens(lengths: np.ndarray, *, budget: int) -> SampleGroups:
    """Return batches of samples of similar length, each of which has at most `budget` tokens when it is padded.

    A sample that is longer is a batch of its own.
    """
    order = np.argsort(-lengths, kind="stable")
    longest_first = lengths[order].tolist()
    starts = [0]
    while starts[-1] < len(longest_first):
        starts.append(starts[-1] + max(1, budget // longest_first[starts[-1]]))
    starts[-1] = len(longest_first)
    return SampleGroups(order, np.array(starts, np.int64))


class _OpenPacks:
    """The open packs, by the tokens that still fit into them."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._packs: dict[int, list[np.ndarray]] = {}
        self._spaces = 0  # bit r is set where packs with room for r tokens are
        self.num_packs = 0

    def place(self, members: np.ndarray, *, length: int, packs: np.ndarray) -> np.ndarray:
        """Put samples of this length into all packs of the best fitting room, or into new ones; return what is left.

        A pack that has taken one has even less room, so it fits best for the next: it takes as many as it can hold.
        """
        space, open_packs = self._best_fit(length, num_samples=len(members))
        each = space // length
        used, unused = np.split(open_packs, [-(-len(members) // each)])
        taken = min(len(members), len(used) * each)
        packs[members[:taken]] = np.repeat(used, each)[:taken]
        last = taken - (len(used) - 1) * each
        self._keep(used[:-1], space=space - each * length)
        self._keep(used[-1:], space=space - last * length)
        self._keep(unused, space=space)
        return members[taken:]

    def _best_fit(self, length: int, *, num_samples: int) -> tuple[int, np.ndarray]:
        fitting = self._spaces >> length
        if fitting == 0:
            first, num_new = self.num_packs, -(-num_samples // (self._budget // length))
            self.num_packs += num_new
            return self._budget, np.arange(first, first + num_new, dtype=np.int64)
        space = length + (fitting & -fitting).bit_length() - 1
        self._spaces ^= 1 << space
        return space, np.concatenate(self._packs.pop(space))

    def _keep(self, packs: np.ndarray, *, space: int) -> None:
        if len(packs) and space:
            self._packs.setdefault(space, []).append(packs)
            self._spaces |= 1 << space


def _by_length(lengths: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Return the places of the samples of each length, the longest first."""
    order = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    return list(zip(values[::-1].tolist(), np.split(order, np.cumsum(counts[::-1])[:-1]), strict=False))


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


WINDOW_SAMPLES = 1 << 20
"""Samples that are packed together: of a larger set, one window of it after the other."""


def set_order(lengths: np.ndarray, *, seed: int, shuffle: bool, batching: BatchingSection, max_length: int) -> Order:
    """Return the endless order of samples of these lengths; each epoch holds every sample once.

    `batching.length_window_steps` is no matter of one set: see `data/order/grouping.py`.
    """
    if batching.by == "samples":
        return SetOrder(seed=seed, num_samples=len(lengths), shuffle=shuffle)
    grouping = best_fit_decreasing if batching.by == "packs" else batches_by_tokens
    budget = tokens_per_position(batching, max_length=max_length)
    return GroupedOrder(lengths, partial(grouping, budget=budget), seed=seed, shuffle=shuffle)


def tokens_per_position(batching: BatchingSection, *, max_length: int) -> int:
    """Return the budget of a pack or a batch by tokens."""
    return batching.tokens if batching.tokens is not None else max_length


class GroupedOrder(PiecewiseOrder):
    """An endless sequence of groups of samples, epoch after epoch, each of which holds every sample once.

    Which samples are in which window is fixed for all epochs, so every epoch has equally many groups. In each epoch
    the samples of a window are grouped again and the groups shuffled, all from (seed, epoch, window).
    """

    def __init__(
        self,
        lengths: np.ndarray,
        group: Grouping,
        *,
        seed: int,
        shuffle: bool,
        window_samples: int = WINDOW_SAMPLES,
    ) -> None:
        self._lengths = np.array(lengths)  # a copy: what is damaged on disk later must not group samples otherwise
        self._group = group
        self._seed = seed
        self._shuffle = shuffle
        self._num_windows = -(-len(lengths) // window_samples)
        self._window_samples = window_samples
        self._grouped = lru_cache(maxsize=2)(self._compute_groups)
        each = [self._group(self._lengths[self._window(number)]).num_groups for number in range(self._num_windows)]
        self._ends = np.cumsum(each)  # of each window's positions within an epoch

    @property
    def num_positions(self) -> int:
        """Return the number of groups."""
        return int(self._ends[-1]) if len(self._ends) else 0

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
        """Return the window's groups of sample ids in the order in which the epoch has them."""
        ids = self._window(window)
        if self._shuffle:
            ids = ids[permutation(len(ids), self._seed, "order", epoch, window)]
        groups = self._group(self._lengths[ids])
        members = ids[groups.members]
        if self._shuffle:
            turn = permutation(groups.num_groups, self._seed, "groups", epoch, window)
        else:
            turn = np.argsort(np.minimum.reduceat(members, groups.starts[:-1]), kind="stable")
        return _in_turn(SampleGroups(members, groups.starts), turn)

    def _window(self, number: int) -> np.ndarray:
        """Return the ids of the window's samples, in the order of the set."""
        places = slice(number * self._window_samples, (number + 1) * self._window_samples)
        num_samples = len(self._lengths)
        if self._num_windows == 1 or not self._shuffle:
            return np.arange(num_samples, dtype=np.int64)[places]
        return np.sort(_windows(self._seed, num_samples)[places])


@lru_cache(maxsize=1)
def _windows(seed: int, num_samples: int) -> np.ndarray:
    return permutation(num_samples, seed, "windows")


def _in_turn(groups: SampleGroups, turn: np.ndarray) -> SampleGroups:
    """Return the groups in another order."""
    sizes = np.diff(groups.starts)[turn]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    places = np.repeat(groups.starts[:-1][turn] - starts[:-1], sizes) + np.arange(len(groups.members))
    return SampleGroups(groups.members[places], starts)


class LengthGroupedOrder(PiecewiseOrder):
    """An order whose samples are sorted by length within every window of a number of steps.

    In a window of one step each step keeps its samples, so its loss is the same. In a larger one the steps get samples
    of similar lengths and are shuffled. No sample leaves its epoch.
    """

    def __init__(
        self, order: Order, lengths_of: LengthsOf, *, seed: int, global_batch_size: int, window_steps: int
    ) -> None:
        self._order = order
        self._lengths_of = lengths_of
        self._seed = seed
        self._step_size = global_batch_size
        self._window_size = global_batch_size * window_steps
        self._sorted = lru_cache(maxsize=2)(self._compute_sorted)

    @property
    def unsorted(self) -> Order:
        """Return the order that is sorted; each window holds the same samples in both."""
        return self._order

    @property
    def window_positions(self) -> int:
        """Return the positions of a window."""
        return self._window_size

    @property
    def num_positions(self) -> int | None:
        """Return those of the order that is sorted."""
        return self._order.num_positions

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the samples at positions [start, stop)."""
        while start < stop:
            window, first = divmod(start, self._window_size)
            last = min(self._window_size, first + stop - start)
            yield self._sorted(window)[first:last]
            start += last - first

    def _compute_sorted(self, window: int) -> np.ndarray:
        start, stop = window * self._window_size, (window + 1) * self._window_size
        ends = _multiples(self._order.num_positions, start, stop) if self._order.num_positions else []
        edges = [start, *ends, stop]
        return concatenated(self._of_one_epoch(*edge) for edge in pairwise(edges))

    def _of_one_epoch(self, start: int, stop: int) -> np.ndarray:
        ids = self._order.samples(start, stop)
        ids = ids[np.argsort(-self._lengths_of(ids), kind="stable")]
        edges = [start, *_multiples(self._step_size, start, stop), stop]
        turn = permutation(len(edges) - 1, self._seed, "lengths", start)  # which part of the sorted samples comes next
        sizes = np.empty_like(turn)
        sizes[turn] = np.diff(edges)
        parts = np.split(ids, np.cumsum(sizes)[:-1])
        return concatenated(parts[number] for number in turn)


class LongestFirstOrder(PiecewiseOrder):
    """The samples of a set from the longest to the shortest, for what depends on no order."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._ids = np.argsort(-np.asarray(lengths, np.int64), kind="stable")

    @property
    def num_positions(self) -> int:
        """Return the number of samples: each is one position."""
        return len(self._ids)

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the samples at positions [start, stop) of the one epoch that there is."""
        yield self._ids[start:stop]


def _multiples(of: int, start: int, stop: int) -> list[int]:
    """Return the multiples of a number strictly between start and stop."""
    return list(range((start // of + 1) * of, stop, of))
