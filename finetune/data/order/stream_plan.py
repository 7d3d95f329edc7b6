"""Which rows are in which window of a stream: shard after shard, in an order drawn for every pass, cut into windows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from finetune.data.order.order import permutation
from finetune.data.rows import RawRow
from finetune.errors import DataError


class RowShard(Protocol):
    """A part of a source that is read without the others."""

    @property
    def name(self) -> str:
        """Return what it is called in messages."""

    @property
    def num_left_out(self) -> int:
        """Return how many rows of the source its reading has passed over by now, because they are evaluated on."""

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield its rows in their order, without the first `start`."""


class Cursor(NamedTuple):
    """Between which rows a window begins, as numbers from 0."""

    pass_number: int
    place: int = 0  # in the pass's order of shards
    row: int = 0  # in that shard


START = Cursor(0)


def excerpt(shards: Sequence[RowShard], *, num_rows: int, num_shards: int) -> Iterator[RawRow]:
    """Yield at most this number of rows, equally many from the beginning of each of a few evenly spread shards."""
    num_chosen = min(num_shards, len(shards))
    for place in range(num_chosen):
        yield from islice(shards[place * len(shards) // num_chosen].rows(), num_rows // num_chosen)


@dataclass(frozen=True)
class StreamPlan:
    """The endless sequence of a stream's rows, pass after pass, each of which holds every row once."""

    shards: Sequence[RowShard]
    window_rows: int
    seed: int
    shuffle: bool = True

    def shards_of(self, pass_number: int) -> list[RowShard]:
        """Return the shards in the order in which this pass goes through them."""
        if not self.shuffle:
            return list(self.shards)
        return [self.shards[number] for number in permutation(len(self.shards), self.seed, "shards", pass_number)]

    def window(self, start: Cursor) -> "WindowRows":
        """Return the rows of the window that begins there."""
        return WindowRows(self, start)

    def place(self, cursor: Cursor) -> str:
        """Return in words where the cursor stands."""
        shards = self.shards_of(cursor.pass_number)
        if cursor.place == len(shards):
            return f"the end of pass {cursor.pass_number + 1}"
        return f"{shards[cursor.place].name} after {cursor.row:,} of its rows"


class WindowRows:
    """The rows of one window, to be taken once; a window never spans two passes, so a pass's last one may be short.

    When all have been taken, `next` is where the following window begins, and `num_left_out` how many rows have been
    passed over before those of the window, because they are evaluated on. Raises DataError when a whole pass has none.
    """

    def __init__(self, plan: StreamPlan, start: Cursor) -> None:
        self._plan = plan
        self.next = start
        self.num_left_out = 0

    def __iter__(self) -> Iterator[RawRow]:
        num_rows = 0
        for row in self._of_pass():
            num_rows += 1
            yield row
        if num_rows == 0:  # the cursor stood behind the last row of its pass
            for row in self._of_pass():
                num_rows += 1
                yield row
        if num_rows == 0:
            raise DataError("a whole pass over the stream has no rows.")

    def _of_pass(self) -> Iterator[RawRow]:
        """Yield the rows up to the end of the window or of the pass."""
        pass_number, first, row = self.next
        left = self._plan.window_rows
        shards = self._plan.shards_of(pass_number)
        for place in range(first, len(shards)):
            self.next = Cursor(pass_number, place, row)
            for raw in self._counted(shards[place], row):
                row, left = row + 1, left - 1
                self.next = Cursor(pass_number, place, row)
                yield raw
                if left == 0:
                    return
            row = 0
        self.next = Cursor(pass_number + 1)

    def _counted(self, shard: RowShard, start: int) -> Iterator[RawRow]:
        """Yield the rows from `start` on; what is left out between two rows counts with the second of them."""
        rows = shard.rows(max(0, start - 1))
        if start:
            next(rows, None)  # a reader that begins here counts what follows the row before, and no more
        before = shard.num_left_out
        for raw in rows:
            self.num_left_out += shard.num_left_out - before
            before = shard.num_left_out
            yield raw
        self.num_left_out += shard.num_left_out - before
