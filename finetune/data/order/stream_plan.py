"""The windows of a stream: shards in an order drawn for every pass, whose rows are cut into windows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from finetune.data.order.order import permutation
from finetune.data.rows import RawRow
from finetune.errors import DataError


class RowShard(Protocol):
    """A part of a source that can be read independently of the others."""

    @property
    def name(self) -> str:
        """Return the name for messages."""

    @property
    def num_left_out(self) -> int:
        """Return the number of rows skipped so far because they are in the validation set."""

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield its rows in order, without the first `start`."""


class Cursor(NamedTuple):
    """The start of a window, as indices from 0."""

    pass_number: int
    shard: int = 0  # index in the pass's order of shards
    row: int = 0  # in that shard


START = Cursor(0)


def excerpt(shards: Sequence[RowShard], *, num_rows: int, num_shards: int) -> Iterator[RawRow]:
    """Yield at most `num_rows` rows: the same number from the start of each of `num_shards` evenly spaced shards."""
    num_chosen = min(num_shards, len(shards))
    for number in range(num_chosen):
        yield from islice(shards[number * len(shards) // num_chosen].rows(), num_rows // num_chosen)


@dataclass(frozen=True)
class StreamPlan:
    """The endless sequence of a stream's rows; each pass contains every row once."""

    shards: Sequence[RowShard]
    window_rows: int
    seed: int
    shuffle: bool = True

    def shards_of(self, pass_number: int) -> list[RowShard]:
        """Return the shards in the order of this pass."""
        if not self.shuffle:
            return list(self.shards)
        return [self.shards[number] for number in permutation(len(self.shards), self.seed, "shards", pass_number)]

    def window(self, start: Cursor) -> "WindowRows":
        """Return the rows of the window that starts at the cursor."""
        return WindowRows(self, start)

    def describe(self, cursor: Cursor) -> str:
        """Return the position of the cursor for messages."""
        shards = self.shards_of(cursor.pass_number)
        if cursor.shard == len(shards):
            return f"the end of pass {cursor.pass_number + 1}"
        return f"{shards[cursor.shard].name} after {cursor.row:,} of its rows"


class WindowRows:
    """The rows of one window, iterated once. Windows do not span passes, so the last one of a pass may be shorter.

    After the iteration, `next` is the start of the following window, and `num_left_out` the number of rows that were
    skipped because they are in the validation set. Raises DataError if a whole pass has no rows.
    """

    def __init__(self, plan: StreamPlan, start: Cursor) -> None:
        self._plan = plan
        self.next = start
        self.num_left_out = 0

    def __iter__(self) -> Iterator[RawRow]:
        num_rows = 0
        for row in self._rest_of_pass():
            num_rows += 1
            yield row
        if num_rows == 0:  # the cursor was at the end of its pass
            for row in self._rest_of_pass():
                num_rows += 1
                yield row
        if num_rows == 0:
            raise DataError("a whole pass over the stream has no rows.")

    def _rest_of_pass(self) -> Iterator[RawRow]:
        """Yield the rows up to the end of the window or of the pass."""
        pass_number, first, row = self.next
        num_missing = self._plan.window_rows
        shards = self._plan.shards_of(pass_number)
        for shard in range(first, len(shards)):
            self.next = Cursor(pass_number, shard, row)
            for raw in self._counted(shards[shard], row):
                row += 1
                num_missing -= 1
                self.next = Cursor(pass_number, shard, row)
                yield raw
                if num_missing == 0:
                    return
            row = 0
        self.next = Cursor(pass_number + 1)

    def _counted(self, shard: RowShard, start: int) -> Iterator[RawRow]:
        """Yield the rows from `start` on; rows skipped between two rows are counted with the second one."""
        rows = shard.rows(max(0, start - 1))
        if start:
            next(rows, None)  # start one row earlier, so that only rows skipped after it are counted
        before = shard.num_left_out
        for raw in rows:
            self.num_left_out += shard.num_left_out - before
            before = shard.num_left_out
            yield raw
        self.num_left_out += shard.num_left_out - before
