"""A source of the job YAML as a stream of rows."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

from finetune.config.sections.data import SourceSection
from finetune.data.formats import RowFormat, choose_format
from finetune.data.hub import load_hub_dataset
from finetune.data.local import find_files
from finetune.data.rows import RawRow
from finetune.errors import DataError


class Origin(Protocol):
    """Where rows come from: files or a hub dataset, whole."""

    @property
    def name(self) -> str:
        """Return what it is called in messages."""

    def digest(self) -> str:
        """Return a digest of the content."""

    def rows(self) -> Iterator[RawRow]:
        """Yield every row in its order."""


class Source:
    """The rows of one origin between `skip` and `take`, and the format that they have.

    `key` is the source's place in the job YAML (`data.train`), for messages. The constructor reads the first row:
    it raises DataError when there is none, when nothing can be read, or when the format cannot be told.
    """

    def __init__(self, section: SourceSection, *, key: str, say: Callable[[str], None]) -> None:
        self.section = section
        self.key = key
        self._origin: Origin = find_files(section.path) if section.path is not None else load_hub_dataset(section)
        self.format: RowFormat = choose_format(section, self._first(), key=key, say=say)

    def digest(self) -> str:
        """Return a digest of the content of the whole origin, `skip` and `take` aside."""
        return self._origin.digest()

    def rows(self) -> Iterator[RawRow]:
        """Yield the rows between `skip` and `take`."""
        stop = None if self.section.take is None else self.section.skip + self.section.take
        return islice(self._origin.rows(), self.section.skip, stop)

    def _first(self) -> RawRow:
        first = next(self.rows(), None)
        if first is not None:
            return first
        after = f" after skip: {self.section.skip}" if self.section.skip else ""
        raise DataError(f"{self.key}: {self._origin.name} has no rows{after}.")


def texts(section: SourceSection, *, key: str, say: Callable[[str], None]) -> Iterator[str]:
    """Yield every text of the source's rows through its format: what a tokenizer is trained on."""
    source = Source(section, key=key, say=say)
    for raw in source.rows():
        row = source.format.read(raw)
        if "text" in row:
            yield row["text"]
        else:
            yield from (turn["content"] for turn in row["messages"])
