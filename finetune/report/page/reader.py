"""Reads events.jsonl piece by piece: each line is parsed once, however often the file is looked at."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from finetune.report.event_lines import EventLines, parse_event_lines
from finetune.report.page.history import RunHistory
from finetune.runtime.files.read import open_regular

_CHUNK_BYTES = 4 << 20


class EventsReader:
    """Adds what is new in the file to a history; a torn or damaged line is counted and left out."""

    def __init__(self, path: Path) -> None:
        self.history = RunHistory()
        self._path = path
        self._offset = 0

    def read_new(self, *, rest: Callable[[], object] = lambda: None) -> None:
        """Read the lines that are complete by now; nothing where there is no file.

        A file that is shorter than before is another one: it is read from its start. `rest` is called after each
        chunk of some MB.
        """
        with suppress(FileNotFoundError), open_regular(self._path) as file:
            if file.seek(0, 2) < self._offset:
                self.history, self._offset = RunHistory(), 0
            for lines, offset in read_chunks(file, self._offset):
                self.history.add(lines.events, num_damaged=lines.num_damaged)
                self._offset = offset
                rest()


def read_chunks(file: BinaryIO, offset: int = 0) -> Iterator[tuple[EventLines, int]]:
    """Yield the events of some MB of whole lines at a time, and where the file goes on after them."""
    file.seek(offset)
    rest = b""
    while chunk := file.read(_CHUNK_BYTES):
        whole, end, rest = (rest + chunk).rpartition(b"\n")
        if end:
            offset += len(whole) + 1
            yield parse_event_lines(whole), offset
