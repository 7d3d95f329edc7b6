"""Which samples share a pack or a batch: pure functions of their lengths."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Groups(NamedTuple):
    """Samples put into groups; group g holds `members[starts[g]:starts[g + 1]]`."""

    members: np.ndarray  # places in the lengths given, each once, group after group
    starts: np.ndarray  # one more than there are groups

    @property
    def num_groups(self) -> int:
        """Return how many groups there are."""
        return len(self.starts) - 1


Grouping = Callable[[np.ndarray], Groups]
"""From lengths to groups, whose number follows from the lengths alone, in whatever order they come."""


def best_fit_decreasing(lengths: np.ndarray, *, budget: int) -> Groups:
    """Return packs of at most `budget` tokens: from the longest sample on, each goes where the least room is left.

    All samples of one length are placed together, so the time is that of sorting them. Among samples of one length
    those that come first are placed first. Raises ValueError for a sample longer than the budget.
    """
    if len(lengths) and int(lengths.max()) > budget:
        raise ValueError(f"a sample of {int(lengths.max())} tokens in packs of {budget}")
    packs = np.empty(len(lengths), np.int64)
    rooms = _Rooms(budget)
    for length, members in _by_length(lengths):
        while len(members):
            members = rooms.place(members, length=length, packs=packs)
    order = np.argsort(packs, kind="stable")
    counts = np.bincount(packs, minlength=rooms.num_packs)
    return Groups(order, _starts(counts))


def batches_by_tokens(lengths: np.ndarray, *, budget: int) -> Groups:
    """Return batches of samples of similar length, each of which has at most `budget` tokens when it is padded.

    A sample that is longer is a batch of its own.
    """
    order = np.argsort(-lengths, kind="stable")
    longest_first = lengths[order].tolist()
    starts = [0]
    while starts[-1] < len(longest_first):
        starts.append(starts[-1] + max(1, budget // longest_first[starts[-1]]))
    starts[-1] = len(longest_first)
    return Groups(order, np.array(starts, np.int64))


class _Rooms:
    """The packs begun so far by the room that is left in them."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._packs: dict[int, list[np.ndarray]] = {}
        self._rooms = 0  # bit r is set where packs with room for r tokens are
        self.num_packs = 0

    def place(self, members: np.ndarray, *, length: int, packs: np.ndarray) -> np.ndarray:
        """Put samples of this length into all packs of the best fitting room, or into new ones; return what is left.

        A pack that has taken one has even less room, so it fits best for the next: it takes as many as it can hold.
        """
        room, open_packs = self._best_fit(length, num_samples=len(members))
        each = room // length
        used, unused = np.split(open_packs, [-(-len(members) // each)])
        taken = min(len(members), len(used) * each)
        packs[members[:taken]] = np.repeat(used, each)[:taken]
        last = taken - (len(used) - 1) * each
        self._keep(used[:-1], room=room - each * length)
        self._keep(used[-1:], room=room - last * length)
        self._keep(unused, room=room)
        return members[taken:]

    def _best_fit(self, length: int, *, num_samples: int) -> tuple[int, np.ndarray]:
        fitting = self._rooms >> length
        if fitting == 0:
            first, num_new = self.num_packs, -(-num_samples // (self._budget // length))
            self.num_packs += num_new
            return self._budget, np.arange(first, first + num_new, dtype=np.int64)
        room = length + (fitting & -fitting).bit_length() - 1
        self._rooms ^= 1 << room
        return room, np.concatenate(self._packs.pop(room))

    def _keep(self, packs: np.ndarray, *, room: int) -> None:
        if len(packs) and room:
            self._packs.setdefault(room, []).append(packs)
            self._rooms |= 1 << room


def _by_length(lengths: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Return the places of the samples of each length, the longest first."""
    order = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    return list(zip(values[::-1].tolist(), np.split(order, np.cumsum(counts[::-1])[:-1]), strict=False))


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
