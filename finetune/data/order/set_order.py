"""The order of one set of samples: sample by sample, in packs, or in batches by tokens."""

from collections.abc import Iterator
from functools import lru_cache, partial

import numpy as np

from finetune.config.sections.data import BatchingSection
from finetune.data.order.order import Order, OrderOfPieces, SetOrder, permutation
from finetune.data.order.packing import Grouping, Groups, batches_by_tokens, best_fit_decreasing

WINDOW_SAMPLES = 1 << 20
"""Samples that are packed together: of a larger set, one window of it after the other."""


def set_order(lengths: np.ndarray, *, seed: int, shuffle: bool, batching: BatchingSection, max_length: int) -> Order:
    """Return the endless order of samples of these lengths; each epoch holds every sample once.

    `batching.length_window_steps` is no matter of one set: see `data/order/by_length.py`.
    """
    if batching.by == "samples":
        return SetOrder(seed=seed, num_samples=len(lengths), shuffle=shuffle)
    grouping = best_fit_decreasing if batching.by == "packs" else batches_by_tokens
    budget = tokens_per_position(batching, max_length=max_length)
    return GroupedOrder(lengths, partial(grouping, budget=budget), seed=seed, shuffle=shuffle)


def tokens_per_position(batching: BatchingSection, *, max_length: int) -> int:
    """Return the budget of a pack or a batch by tokens."""
    return batching.tokens if batching.tokens is not None else max_length


class GroupedOrder(OrderOfPieces):
    """An endless sequence of groups of samples, epoch after epoch, each of which holds every sample once.

    Which samples are in which window is settled for all epochs, so every epoch has equally many groups. In each epoch
    the samples of a window are grouped anew and the groups shuffled, all from (seed, epoch, window).
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
        self._grouped = lru_cache(maxsize=2)(self._grouped_anew)
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

    def _grouped_anew(self, epoch: int, window: int) -> Groups:
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
        return _in_turn(Groups(members, groups.starts), turn)

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


def _in_turn(groups: Groups, turn: np.ndarray) -> Groups:
    """Return the groups in another order."""
    sizes = np.diff(groups.starts)[turn]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    places = np.repeat(groups.starts[:-1][turn] - starts[:-1], sizes) + np.arange(len(groups.members))
    return Groups(groups.members[places], starts)
