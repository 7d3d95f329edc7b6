"""A prepared set made in a folder from any rows; what a process that was killed has made of it is not made again."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from finetune.data.prepared.counts import Counts
from finetune.data.prepared.parallel import Encoders
from finetune.data.prepared.store import MANIFEST, Identity, PreparedSet
from finetune.data.prepared.writing import SetWriter
from finetune.data.rows import RawRow
from finetune.data.verified.damage import DamagedSet
from finetune.errors import DataError
from finetune.runtime.waypoints import reach

CHUNKS_BETWEEN_NOTES = 16
"""After so many chunks the files are brought to the disk and the journal gets a line: what a kill can cost."""

Advance = Callable[[int], None]
"""Told how many rows are behind, whoever has encoded them."""


def nobody(rows: int) -> None:
    """Tell nobody."""


def not_told(reason: str) -> None:
    """Tell nobody."""


def build_set(
    folder: Path,
    rows: Iterator[RawRow],
    encoders: Encoders,
    made_of: Identity,
    *,
    advance: Advance = nobody,
    num_left_out: Callable[[], int] = int,
    lost: Callable[[str], None] = not_told,
) -> Counts:
    """Make a prepared set of the rows in the folder and return its counts.

    `num_left_out` tells after the last row how many the source has left out because they are evaluated on. Where a
    build of the same identity was cut off in this folder, it goes on after the rows that its journal names, and the
    result is the same to the bit; `lost` is told why that cannot be, and all is made again. Raises DataError for a row
    that cannot be encoded, OSError for a full disk.
    """
    if (folder / MANIFEST).exists():
        try:
            return _whole(folder)
        except DamagedSet as damage:
            lost(damage.reason)
    writer = SetWriter(folder, made_of)
    if writer.given_up is not None:
        lost(writer.given_up)
    try:
        _append_rows(writer, _after(rows, writer.counts.rows), encoders, advance=advance)
        reach("prepare.finish", step=writer.counts.rows)
        writer.count(Counts(excluded_rows=num_left_out()))
        return writer.finish()
    finally:
        writer.close()


def _whole(folder: Path) -> Counts:
    prepared = PreparedSet(folder)
    prepared.verify()
    return prepared.counts


def _append_rows(writer: SetWriter, rows: Iterator[RawRow], encoders: Encoders, *, advance: Advance) -> None:
    advance(writer.counts.rows)
    for number, chunk in enumerate(encoders.encode(rows), start=1):
        reach("prepare.write", step=number)
        writer.append(chunk)
        if number % CHUNKS_BETWEEN_NOTES == 0:
            writer.note()
            reach("prepare.noted", step=number // CHUNKS_BETWEEN_NOTES)
        advance(writer.counts.rows)


def _after(rows: Iterator[RawRow], num_done: int) -> Iterator[RawRow]:
    """Return the rows behind those that are done."""
    if sum(1 for _ in islice(rows, num_done)) < num_done:
        raise DataError(f"there are fewer rows than the {num_done:,} of which the set was begun. Start again.")
    return rows
