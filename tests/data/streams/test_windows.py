"""Which rows are in which window follows from the shards, the seed and the window's size alone."""

from dataclasses import dataclass
from itertools import islice

from finetune.data.rows import RawRow
from finetune.data.streams.windows import START, Cursor, StreamPlan, WindowRows
from finetune.errors import DataError
from tests.refusals import refused


@dataclass
class Letters:
    """A shard whose rows are the letters of its name; a dot is left out."""

    name: str
    num_left_out: int = 0

    def rows(self, start=0):
        return islice(self._rows(), start, None)

    def _rows(self):
        for number, letter in enumerate(self.name, start=1):
            if letter == ".":
                self.num_left_out += 1
            else:
                yield RawRow(self.name, number, {"text": letter})


def windows_of(plan, count, start=START):
    """Return the letters of so many windows, and where each begins."""
    letters, cursors = [], []
    for _ in range(count):
        cursors.append(start)
        window = WindowRows(plan, start)
        letters.append("".join(row.content["text"] for row in window))
        start = window.next
    return letters, cursors


def plan_of(*names, window_rows, **keys):
    return StreamPlan([Letters(name) for name in names], window_rows, seed=3, **keys)


def test_windows_go_through_the_shards_in_their_order_where_nothing_is_shuffled():
    letters, cursors = windows_of(plan_of("abc", "de", "f", window_rows=2, shuffle=False), 4)
    assert letters == ["ab", "cd", "ef", "ab"]
    assert cursors == [Cursor(0, 0, 0), Cursor(0, 0, 2), Cursor(0, 1, 1), Cursor(0, 2, 1)]


def test_every_pass_holds_every_row_once_with_the_shards_in_another_order():
    names = ["ab", "cde", "f", "ghij", "kl", "mn"]
    letters, _ = windows_of(plan_of(*names, window_rows=5), 9)
    passes = ["".join(letters[first : first + 3]) for first in (0, 3, 6)]
    assert all(sorted(each) == list("abcdefghijklmn") for each in passes)
    assert all(name in each for name in names for each in passes)  # the rows of a shard stay in their order
    assert len(set(passes)) == 3
    assert windows_of(plan_of(*names, window_rows=5), 9)[0] == letters


def test_reading_can_begin_at_any_window():
    plan = plan_of("ab", "cde", "f", "ghij", window_rows=3)
    letters, cursors = windows_of(plan, 8)
    for window, cursor in enumerate(cursors):
        assert windows_of(plan, 8 - window, cursor)[0] == letters[window:]


def test_left_out_rows_of_a_stream_are_counted_once_from_any_start():
    plan = plan_of(".a..b.", "..", "c.d.e..", window_rows=2, shuffle=False)
    cursor, counted = START, []
    for _ in range(4):
        window = WindowRows(plan, cursor)
        letters = "".join(row.content["text"] for row in window)
        counted.append((letters, window.num_left_out))
        cursor = window.next
    assert counted == [("ab", 3), ("cd", 4), ("e", 3), ("ab", 3)]


def test_a_stream_without_a_row_is_an_error():
    with refused(DataError):
        windows_of(plan_of("", "", window_rows=2), 1)
